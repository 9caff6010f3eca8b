"""All checks of a request, made before the service accepts it. They never wait and keep no state of their own."""
