"""The asyncio client, and the sources from which scripts/generate_sync.py makes its synchronous twin, `_sync`."""
