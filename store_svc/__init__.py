"""The store service: keeps captures in LMDB and serves them by ID.

Writing a chunk passes through these modules:

1. `writing.append` reads one writer's stream.
2. `writing.writer` is the one thread that writes; it commits chunks in groups.
3. `writing.changes` applies one transaction's changes.
4. `database.db` is LMDB.

Reading passes through `reading.reader`, which picks the frames and their rows, to `database.db`.

`captures.catalog` holds the published state of every capture. `captures.lifecycle` and `captures.ledger` are the rules;
they do no I/O.
"""
