"""Reads the output of a job, and exports it as tables, Zarr groups or tar files."""
