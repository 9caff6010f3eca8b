"""Sends the prompts of a job to one or several services, and writes their rows as shards."""
