"""The captures of this service's requests, in one store or several."""
