"""Code shared by both services: serving, access control, settings, logs, metrics, and launching them."""
