"""The overhead of the service over vLLM's engine; see `python -m bench.service --help`."""
