"""The store service: keeps captures in LMDB and serves them by id.

The way of a chunk: `append` (one stream of a writer) -> `writer` (one thread, group commit) -> `changes` (what a
transaction does) -> `db` (LMDB). The way back: `reader` (which frames, which rows of them) -> `db`.
`catalog` holds what is published of each capture; `capture` and `ledger` are the rules, without I/O.
"""
