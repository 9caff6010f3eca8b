"""vLLM's engine: how it is started, what it serves, and how requests reach it."""
