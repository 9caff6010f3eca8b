"""The contract in Python, without I/O: dtypes, digests, encodings, frames, selections, placement and limits."""
