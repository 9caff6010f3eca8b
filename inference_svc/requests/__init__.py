"""Requests: reading prompts, decoding replies, keeping track of requests, and making the plans of the workers."""
