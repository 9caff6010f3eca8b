"""How rows are encoded, sent and kept: encodings, chunks and the messages that carry them, shared memory, archives."""
