"""Captures: their names, their lifecycle, which rows they have, and their published state."""
