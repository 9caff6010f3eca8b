"""The asyncio client, and the sources from which scripts/generate_sync.py makes its synchronous twin, `_sync`.

`make sync` generates `_sync` with `unasync`. A test compares the committed files with what would be generated. Three
modules are written by hand in both folders, with the same names: `io` (how a call is waited for), `streams` (a
synchronous stream starts at once, an asyncio one when it is entered or first read) and `batches` (threads, or tasks).
Users import from `residuum`, `residuum.client` and `residuum.aio`.
"""
