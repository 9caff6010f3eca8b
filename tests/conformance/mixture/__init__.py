"""Random requests of all kinds at once, each compared with an independent reference; see `__main__.py`."""
