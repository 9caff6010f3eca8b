"""The prompts of a job, from files, tables or a list; also packed into windows of tokens."""
