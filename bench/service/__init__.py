"""What the service adds to vLLM's own engine: see `python -m bench.service --help`."""
