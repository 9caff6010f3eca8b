"""All checks of a request, made before the service accepts it. These functions never wait and keep no state."""
