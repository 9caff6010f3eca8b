"""Connections to the services, and calls that run on them."""
