"""Reads many captures at once, and captures in an archive."""
