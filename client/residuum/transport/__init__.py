"""Connections to the services, and code that both clients run before and after calls."""
