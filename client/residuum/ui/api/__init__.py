"""The calls of the page, at /api; app.py has their paths."""
