"""The contract in Python, without I/O: dtypes, digests, selections, placement, limits. Rooms: rows, probes."""
