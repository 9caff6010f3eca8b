"""One request in vLLM's API server: its arguments, its checks, its run, and what its caller gets."""
