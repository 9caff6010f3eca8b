"""Builds requests to the services and interprets their answers, without I/O. Both clients use it."""
