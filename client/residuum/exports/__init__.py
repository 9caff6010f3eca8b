"""Exports of activations to files. They are written in slices, so memory is bounded for captures of any size."""
