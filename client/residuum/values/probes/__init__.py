"""Probes with their weights, scores and smoothing, and the rules that act on scores."""
