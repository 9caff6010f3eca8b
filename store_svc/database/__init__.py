"""The database, and the keys in it."""
