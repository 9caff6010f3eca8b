"""Reads many captures at once."""
