"""vLLM's names for the ends of sequences that it gave up. All other names are of normal ends."""

ABORTED = "abort"
FAILED = "error"
