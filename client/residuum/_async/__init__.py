"""The asyncio client, from which scripts/generate_sync.py generates the synchronous client, `_sync`.

`make sync` runs the script. A test checks that the committed files are up to date. Three modules are written by hand
in both folders: `io` (how to wait for a call), `streams` (a synchronous stream starts at once, an asyncio one when it
is entered or first read) and `batches` (threads or tasks). Users import from `residuum`, `residuum.client` and
`residuum.aio`.
"""
