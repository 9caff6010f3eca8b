"""The store service: keeps captures in LMDB and serves them by id.

The way of a chunk: `writing.append` (one stream of a writer) -> `writing.writer` (one thread, group commit) ->
`writing.changes` (what a transaction does) -> `database.db` (LMDB). The way back: `reading.reader` (which frames, which
rows of them) -> `database.db`. `captures.catalog` holds what is published of each capture; `captures.lifecycle` and
`captures.ledger` are the rules, without I/O.
"""
