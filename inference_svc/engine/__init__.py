"""vLLM's engine: its start, the facts of the served model, and the calls that reach its workers."""
