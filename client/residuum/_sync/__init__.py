"""The synchronous client. Files that say so are generated from `_async` by scripts/generate_sync.py."""
