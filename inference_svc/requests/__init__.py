"""Requests: reading their prompts, keeping track of them, and making the plans that the workers follow."""
