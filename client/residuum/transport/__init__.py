"""Connections to the services, and what both clients do around calls."""
