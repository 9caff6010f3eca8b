"""Benchmarks: each claim about speed, made again by one command. See README.md."""
