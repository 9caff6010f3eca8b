"""Limits of the contract, for clients and services. The protos document them."""

from __future__ import annotations

BLOCK_TOKENS = 32
"""Positions in a block, and so in most chunks: rows leave the model's process in blocks."""

TARGET_CHUNK_BYTES = 15 << 17
"""The payload size that writers aim at, 1.9 MiB: the most that fits into a chunk with its header. Larger messages
spread their fixed cost over more rows; with messages of 1 MiB, each row takes a fifth more processor time."""

MAX_CHUNK_BYTES = 2 << 20
"""The largest chunk that a store accepts in a message, header and payload together."""

TARGET_PLACED_CHUNK_BYTES = 47 << 17
"""The payload size that writers aim at in shared memory, 5.9 MiB: with its header, it fits the memory of our client.
Each chunk costs a store and its reader the same work in Python, which lets only one thread run at a time, so throughput
grows with the size. A block of a model with 3 billion parameters has 4.7 MB."""

MAX_PLACED_CHUNK_BYTES = 8 << 20
"""The largest chunk that a store accepts in shared memory. Readers without shared memory get it in parts."""

MAX_MESSAGE_BYTES = 4 << 20
"""gRPC's default receive limit, kept so that an oversized message fails."""

MAX_CHUNK_POSITIONS = 4096
"""Positions in one chunk."""

MAX_RANGES = 64
"""Ranges in one position selection."""

MAX_OPERATIONS = 256
"""Steering operations in one request."""

MAX_PROBE_OUTPUTS = 64
"""Outputs of all probes of one request."""

MAX_PROBE_LAYERS = 2
"""Layers of a probe that is an MLP, after its first one. Each has at most MAX_PROBE_OUTPUTS outputs."""

MAX_PROBE_PLACES = 16
"""Places (a site of a layer) that one probe may read."""

MAX_PROBE_HEADS = 16
"""Heads of an attention probe."""

MAX_PROBES_BYTES = 256 << 10
"""Bytes of all probes and rules of one request, as a serialised message, which is part of its capture's description."""

MAX_OPERATOR_RULES = 8
"""Rules of the operator."""

MAX_SMOOTHING_WINDOW = 1024
"""Tokens over which a maximum or a mean of scores is taken, unless it is over all."""

MAX_KEPT_SCORES = 1 << 17
"""Numbers of the scores that are stored with one capture, of its prompt and all sequences: half a megabyte."""

MAX_RULES = 32
"""Rules of one request."""

MAX_RULE_EVENTS_BYTES = 256 << 10
"""Bytes of all events of rules of one request, which are part of its manifest. Each rule may fire in each sequence."""

MIN_DIRECTION_NORM = 1e-30
"""The smallest norm of a vector used as a direction. Below it, squares of the elements underflow in float32."""

MAX_DIRECTION_NORM = 1e30
"""The largest norm of a vector used as a direction. Above it, squares of the elements overflow in float32."""

MAX_STEERING_CHANGES = 256
"""Changes of the steering of one running request."""

MAX_STEERING_CHANGES_BYTES = 256 << 10
"""Bytes of all steering changes of one request, which are part of its manifest."""

MAX_UNEMBEDDED = 1 << 17
"""Log-probabilities in one answer of Unembed, which take a megabyte."""

MAX_DIGESTS_PER_CALL = 1024
"""Digests in one FindMissingVectors."""

DIGEST_BYTES = 32
"""Length of a SHA-256."""

MAX_PROJECTION_VECTORS = 256
"""Vectors onto which one capture's rows may be projected."""

MAX_SAE_FEATURES = 1 << 20
"""Features of a sparse autoencoder."""

MAX_KEPT_FEATURES = 256
"""Features of a sparse autoencoder that are kept of one row."""

DEFAULT_KEPT_FEATURES = 32
"""Features of a sparse autoencoder that are kept of one row, if the caller does not choose their number."""

DEFAULT_PROJECTION = 512
"""Dimensions of a random projection, if neither the caller nor the operator chooses them."""

DEFAULT_TOPK = 128
"""Elements that topk and topk8 keep, if neither the caller nor the operator chooses their number."""

MAX_STOP_STRINGS = 16
"""Stop strings in one request."""

MAX_STOP_TOKENS = 64
"""Stop tokens in one request. vLLM has room for 128, of which the model's own end-of-sequence tokens take some."""

MAX_LOGIT_BIASES = 1024
"""Token IDs with a bias in one request, as many as vLLM has room for."""

MAX_BAD_WORDS = 128
"""Bad words in one request. The same limit holds for the token sequences that they make: some words make two."""

MAX_BAD_WORD_TOKENS = 1024
"""Tokens of the sequences that one request's bad words make, as many as vLLM has room for."""

MAX_GRAMMAR_BYTES = 1 << 16
"""Bytes of a JSON schema or a regular expression that a reply must follow."""

MAX_SEQUENCES = 64
"""Sequences generated from one prompt."""

MAX_TOP_K = (1 << 31) - 1
"""The largest `top_k`: vLLM stores it in 32 bits."""

MAX_SEED = (1 << 63) - 1
"""The largest seed: vLLM stores it in 64 bits."""

MAX_CAPTURE_TOKENS = 131_072
"""Tokens of one capture at up to four sites: prompt and generated tokens of all sequences. The prompt counts once for
each sequence. `max_capture_tokens` has the limit for more sites.

This limit keeps a manifest, which is one message, below MAX_MESSAGE_BYTES. Two things make a manifest long: the token
IDs, and the runs of positions when a selection leaves gaps. With `every: 2` it has a run of ten bytes for every second
token, once for each site. With four sites and this many tokens that is just under 3 MiB, which leaves room for the
steering and its changes. Layers that miss other rows than the rest are listed separately. There is room for these too,
unless the worst cases coincide: losses and a selection with gaps, at all sites.
"""

_SITES_AT_MOST_TOKENS = 4


def max_capture_tokens(sites: int) -> int:
    """Return the limit of tokens for a capture at a number of sites: more sites leave room for fewer tokens."""
    return MAX_CAPTURE_TOKENS * _SITES_AT_MOST_TOKENS // max(sites, _SITES_AT_MOST_TOKENS)


MAX_DESCRIPTION_BYTES = 1 << 20
"""Bytes of a capture's description. The prompt's token IDs, and steering with as many vectors as a server's tables
hold, take half of it."""

MAX_SEAL_BYTES = 5 << 18
"""Bytes of the message that seals a capture, 1.25 MiB: the token IDs, the steering changes, the events of rules, the
scores, the texts of tokens and the positions of messages. The inference service leaves out what does not fit: first the
scores, then the texts, then the positions."""

MAX_MANIFEST_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""Bytes of a manifest, without its labels. Of a longer one the store leaves out the scores, then the texts of tokens,
and then the positions of messages. Without these no manifest is longer; see MAX_CAPTURE_TOKENS."""

MAX_MESSAGE_SPANS = 16_384
"""Messages of a conversation whose positions are kept."""

MAX_DETAIL_LENGTH = 4096
"""Characters of a writer's explanation of why rows were lost or a request failed."""

MAX_NAME_LENGTH = 1024
"""Characters of a model's name, which summaries repeat."""

MAX_CAPTURE_ROWS_AT_A_POSITION = 1 << 16
"""Rows at one position of a capture: sequences × sites × layers."""

MAX_VECTORS_PER_CALL = 4096
"""Vectors in one PutVectors."""

MAX_ID_LENGTH = 128
"""Characters in a request ID."""

MAX_WAIT_SECONDS = 300.0
"""The longest time that one GetCapture waits for a capture to end."""

MAX_CAPTURES_PER_READ = 4096
"""Captures in one ReadCaptures."""

MAX_CAPTURES_PER_DELETION = 1024
"""Captures in one DeleteCaptures. The store deletes them in one transaction or two, for which writers wait."""

MAX_CAPTURES_PER_OPEN = 256
"""Captures in one OpenCaptures or SealCaptures. They share one transaction or two, as in DeleteCaptures."""

MAX_SEARCH_HITS = 10_000
"""Hits of one search."""

MAX_SEARCH_CONTEXT = 64
"""Tokens of text before and after a hit of a search."""

MAX_SEARCH_WIDTH = 1 << 18
"""Elements of the vector of a search, which take a megabyte."""

MAX_LABELS = 32
"""Labels of one capture."""

MAX_LABELS_BYTES = 4096
"""Bytes of all labels of one capture, as serialised messages."""

MAX_LABEL_NAME_LENGTH = 64
"""Characters in the name of a label."""

MAX_LABEL_TEXT_LENGTH = 256
"""Characters in the text of a label."""

MAX_WHERE_LENGTH = 1024
"""Characters in a filter on labels."""

MAX_WHERE_CONDITIONS = 16
"""Conditions in a filter on labels."""

MAX_PAGE_BYTES = 3 << 20
"""The size at which a page of a list ends, though it may have room for more captures."""

DEFAULT_PAGE_SIZE = 100
"""Captures in a page if the caller does not choose a number."""

MAX_PAGE_SIZE = 1000
"""The most captures in a page."""

DEFAULT_MAX_TOKENS = 16
"""Tokens to generate if the caller does not choose a number."""
