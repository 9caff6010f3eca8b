"""Activations as files of other formats, written in pieces: what is in memory at once is bounded, not a capture."""
