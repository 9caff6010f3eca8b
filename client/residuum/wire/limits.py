"""Sizes that both ends of the contract keep to. The protos state them; these are their names in Python."""

from __future__ import annotations

BLOCK_TOKENS = 32
"""Token positions in a capture block, and so in most chunks: rows leave the model's process this many at a time."""

TARGET_CHUNK_BYTES = 15 << 17
"""Payload that a writer aims at, 1.9 MiB: as much as fits a chunk beside its header. What a message costs whatever its
size is shared by more rows; a message of 1 MiB takes a fifth more processor time for each of them."""

MAX_CHUNK_BYTES = 2 << 20
"""The largest chunk that a store accepts, payload and header together."""

MAX_MESSAGE_BYTES = 4 << 20
"""gRPC's default receive limit, kept so that a mistake is loud."""

MAX_CHUNK_POSITIONS = 4096
"""Positions in one chunk."""

MAX_RANGES = 64
"""Ranges in one position selection."""

MAX_OPERATIONS = 256
"""Steering operations in one request."""

MIN_DIRECTION_NORM = 1e-30
"""The least norm of a vector that gives a direction: below, its squares vanish in float32."""

MAX_DIRECTION_NORM = 1e30
"""The greatest."""

MAX_STEERING_CHANGES = 256
"""Changes of the steering of one running request."""

MAX_STEERING_CHANGES_BYTES = 256 << 10
"""Bytes of all of them: they are a part of the manifest."""

MAX_DIGESTS_PER_CALL = 1024
"""Digests in one FindMissingVectors."""

DIGEST_BYTES = 32
"""Length of a SHA-256."""

MAX_PROJECTION_VECTORS = 256
"""Vectors onto which the rows of one capture may be projected."""

DEFAULT_PROJECTION = 512
"""Dimensions of a random projection, if neither the caller nor the operator says how many."""

DEFAULT_TOPK = 128
"""Elements of greatest magnitude that are kept, if neither the caller nor the operator says how many."""

MAX_STOP_TEXTS = 16
"""Stop texts in one request."""

MAX_SEQUENCES = 64
"""Sequences generated from one prompt."""

MAX_CAPTURE_TOKENS = 131_072
"""Tokens of one capture: prompt and generated, of all sequences, the prompt counted for each of them.

A manifest is one message. What makes it long are the token ids, and the runs of positions when a selection leaves gaps:
with `every: 2` a run of ten bytes for every other token, once for each site. With all four sites and this many tokens
that is just under 3 MiB, so it fits MAX_MESSAGE_BYTES, beside the steering and its changes. Layers that miss other rows
than the rest are listed apart, and there is room for that too, unless both the selection and the losses are of the
worst kind: all sites, with gaps.
"""

MAX_DESCRIPTION_BYTES = 1 << 20
"""Bytes of a capture's description: the prompt's token ids, and a steering that names as many vectors as fit a server's
tables, leave half of it."""

MAX_SEAL_BYTES = 5 << 18
"""Bytes of the message that seals a capture, 1.25 MiB: the token ids, and the changes of its steering."""

MAX_DETAIL_LENGTH = 4096
"""Characters of what a writer tells a person: why rows were lost, or a request failed."""

MAX_NAME_LENGTH = 1024
"""Characters of a model's name, which is also listed."""

MAX_CAPTURE_ROWS_AT_A_POSITION = 1 << 16
"""Rows that one position of a capture may have: sequences times sites times layers."""

MAX_VECTORS_PER_CALL = 4096
"""Vectors in one PutVectors."""

MAX_ID_LENGTH = 128
"""Characters in a request id."""

MAX_WAIT_SECONDS = 300.0
"""The longest wait for a capture's end that one GetCapture grants."""

DEFAULT_PAGE_SIZE = 100
"""Captures in a page when the caller names no number."""

MAX_PAGE_SIZE = 1000
"""Captures in a page at most."""

DEFAULT_MAX_TOKENS = 16
"""Tokens generated when the caller names no number."""
