"""Many captures at once."""
