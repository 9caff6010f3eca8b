"""Runs every configuration of bench.isolated and every peer, and writes a report."""
