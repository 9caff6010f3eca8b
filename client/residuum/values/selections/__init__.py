"""Selections of layers, positions and sites, in the forms that users may write."""
