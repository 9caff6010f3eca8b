"""Benchmarks: one command reproduces each claim about speed. See README.md."""
