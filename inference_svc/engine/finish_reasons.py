"""vLLM's finish reasons for sequences that it gave up. All other finish reasons are normal ends."""

ABORTED = "abort"
FAILED = "error"
