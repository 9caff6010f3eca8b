"""The contract in Python, without I/O: dtypes, digests, frames, selections and limits."""
