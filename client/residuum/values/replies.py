"""Answers of the services, as frozen Python values."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from residuum.exceptions import NoTokenTexts
from residuum.v1 import store_pb2
from residuum.values.logprobs import Logprobs
from residuum.values.manifest import ARCHIVE_STATES, STATES, to_datetime
from residuum.values.probes import Probe
from residuum.values.rules import RuleEvent
from residuum.values.sae import SAE
from residuum.values.scores import Scores
from residuum.values.vector import Vector
from residuum.wire.labels import LabelValue, to_dict
from residuum.wire.placement import StoreAddress


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of one sequence.

    Attributes:
        text: The new text. It may be empty while a character is incomplete.
        token_ids: The new token IDs.
        sequence: The sequence; 0 unless n > 1.
        logprobs: The log-probabilities of the new tokens; None unless `logprobs` was given.
        scores: The scores of the new tokens by the names of the request's probes: float32 [tokens], or [tokens,
            outputs] if the probe has several outputs. See `Sequence.scores`.
        prompt_scores: The same for the next positions of the prompt; None if there are none. With `score_prompt`, they
            come in deltas before the first token, or with it. These deltas continue each other, and may have no tokens.
        events: The rules that fired at the new tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    sequence: int = 0
    logprobs: Logprobs | None = field(default=None, repr=False, compare=False)
    scores: Scores | None = field(default=None, repr=False, compare=False)
    prompt_scores: Scores | None = field(default=None, repr=False, compare=False)
    events: tuple[RuleEvent, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Usage:
    """The token counts of a request.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        generated_tokens: Generated tokens of all sequences together.
    """

    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Sequence:
    """One of the sequences generated for a prompt.

    Attributes:
        text: The generated text.
        token_ids: The generated token IDs.
        finish_reason: "stop" (end of sequence, a stop token, a stop text, or the end of a structured output),
            "length", or "rule".
        stop_reason: The stop text or the name of the rule that ended the sequence; empty if none did.
        stop_token_id: The stop token that ended the sequence, which is its last token; None if none did.
        logprobs: The log-probabilities of the generated tokens; None unless `logprobs` was given.
        token_texts: As `tokens`; None if the server did not send them.
        scores: The scores of the generated tokens by the names of the request's probes: float32 [tokens], or [tokens,
            outputs] if the probe has several outputs. The score of a token is that of the row from which the model
            predicted it, which is the row of the position before. None without `probes`, for a registration that was
            given as an ID, whose probes the client does not know, and if nothing was generated because a capture
            existed that has no scores.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str = ""
    stop_token_id: int | None = None
    logprobs: Logprobs | None = field(default=None, repr=False, compare=False)
    token_texts: tuple[str, ...] | None = field(default=None, repr=False)
    scores: Scores | None = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of each generated token.

        A token's text is what it adds to the text of the tokens before it. If a character takes several tokens, the
        last of them has it, and the others have an empty text. Special tokens, stop tokens and stop texts are shown, so
        the texts joined may be longer than `text`.

        Raises:
            NoTokenTexts: The server did not send them.
        """
        if self.token_texts is None:
            raise NoTokenTexts(
                "The reply has no texts of its tokens: the server is older than this feature, or its engine has no "
                "tokenizer. The token IDs are in token_ids."
            )
        return self.token_texts


@dataclass(frozen=True)
class Reply:
    """The reply to a prompt.

    Attributes:
        request_id: The ID of the request and of its capture: `client.activations(reply.request_id)`.
        prompt_token_ids: The prompt as the model saw it.
        sequences: The generated sequences, `n` of them.
        usage: The token counts.
        captured: Whether the request has a capture.
        store_endpoint: The address of the store that holds the capture.
        skipped: Whether nothing was generated, because the capture existed already (`if_exists="skip"`).
        prompt_logprobs: The log-probabilities of the prompt's tokens; None unless `prompt_logprobs` was given.
        prompt_scores: The scores of the prompt's positions by the names of the request's probes: float32 [positions],
            or [positions, outputs] if the probe has several outputs. The last one is also the score of the first
            generated token. None unless `score_prompt` was given.
        events: The rules that fired, in all sequences: by sequence, in the order of the tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sequences: tuple[Sequence, ...]
    usage: Usage
    captured: bool = False
    store_endpoint: str = ""
    skipped: bool = False
    prompt_logprobs: Logprobs | None = field(default=None, repr=False, compare=False)
    prompt_scores: Scores | None = field(default=None, repr=False, compare=False)
    events: tuple[RuleEvent, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated token IDs of the first sequence."""
        return self.sequences[0].token_ids

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of each generated token of the first sequence; see `Sequence.tokens`.

        Raises:
            NoTokenTexts: The server did not send them.

        Example:
            >>> client.generate("The capital of France is", max_tokens=3).tokens
            (' Paris', '.', ' It')
        """
        return self.sequences[0].tokens

    @property
    def finish_reason(self) -> str:
        """Why the first sequence ended: "stop", "length" or "rule"."""
        return self.sequences[0].finish_reason

    @property
    def stop_reason(self) -> str:
        """The stop text or the name of the rule that ended the first sequence; empty if none did."""
        return self.sequences[0].stop_reason

    @property
    def logprobs(self) -> Logprobs | None:
        """The log-probabilities of the generated tokens of the first sequence; None unless `logprobs` was given."""
        return self.sequences[0].logprobs

    @property
    def scores(self) -> Scores | None:
        """The scores of the generated tokens of the first sequence; see `Sequence.scores`.

        Example:
            >>> client.generate("Once upon a time", max_tokens=3, probes=[probe]).scores["question"]
            array([0.02, 0.91, 0.33], dtype=float32)
        """
        return self.sequences[0].scores

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Registration:
    """A validated request that waits for its prompt.

    Attributes:
        request_id: The ID of the request.
        expire_time: When the registration expires if it is not used.
        time_to_live: Seconds from the server's answer until then.
        vectors: The request's vectors. The client sends them again if the server has dropped them.
        probes: The request's probes, which name the scores.
        sae: The sparse autoencoder whose features it captures. The client sends it again if the server has dropped it.
    """

    request_id: str
    expire_time: datetime.datetime | None
    time_to_live: float
    vectors: tuple[Vector, ...] = field(default=(), repr=False)
    probes: tuple[Probe, ...] = field(default=(), repr=False)
    sae: SAE | None = field(default=None, repr=False)


@dataclass(frozen=True)
class PutSAEResult:
    """The result of `put_sae`.

    Attributes:
        digest: The digest of the encoder in hexadecimal.
        sent: Whether the server lacked it.
        num_bytes: Bytes of the server's memory for encoders that it takes.
        free_bytes: Bytes that are left, counting those of encoders that no request needs.
    """

    digest: str
    sent: bool
    num_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class PutResult:
    """The result of `put_vectors`.

    Attributes:
        digests: The digests of the given vectors in hexadecimal, in order.
        sent: Number of vectors sent: 0 if the server had them all.
        bytes_sent: Bytes of vector values sent.
    """

    digests: tuple[str, ...]
    sent: int
    bytes_sent: int


@dataclass(frozen=True)
class CaptureSummary:
    """A capture's entry in `client.captures()`.

    Attributes:
        capture_id: The ID of the capture and of its request.
        model: The model.
        state: "open", "complete", "incomplete" or "aborted".
        num_rows: Rows in the store, counted once for each layer and site.
        num_bytes: Bytes of chunks in the store.
        open_time: When the capture was opened.
        end_time: When the capture ended; None while it is open.
        store: The name of the store that holds it.
        tenant: The tenant that it belongs to; empty for the default tenant.
        labels: Its labels.
        archive_state: Where its rows are, if the store has an archive; see `Manifest.archive_state`.
    """

    capture_id: str
    model: str
    state: str
    num_rows: int
    num_bytes: int
    open_time: datetime.datetime | None
    end_time: datetime.datetime | None
    store: str = ""
    tenant: str = ""
    labels: Mapping[str, LabelValue] = field(default_factory=dict, hash=False)
    archive_state: str = ""

    @classmethod
    def from_proto(cls, proto: store_pb2.CaptureSummary, store: str = "") -> CaptureSummary:
        """Return the value of a message from the store with this name."""
        return cls(
            capture_id=proto.capture_id,
            model=proto.model,
            state=STATES.get(proto.state, "unknown"),
            num_rows=proto.num_rows,
            num_bytes=proto.num_bytes,
            open_time=to_datetime(proto.open_time),
            end_time=to_datetime(proto.end_time),
            store=store,
            tenant=proto.tenant,
            archive_state=ARCHIVE_STATES.get(proto.archive_state, ""),
            labels=to_dict(proto.labels),
        )


@dataclass(frozen=True)
class CapturePage:
    """One page of the list of captures.

    Attributes:
        captures: The captures, newest first.
        next_page_token: The token of the next page; empty on the last page.
    """

    captures: tuple[CaptureSummary, ...]
    next_page_token: str


@dataclass(frozen=True)
class StoreStats:
    """Statistics of a store.

    Attributes:
        endpoint: The store's address.
        captures: Number of captures in each state.
        num_bytes: Bytes of all chunks.
        num_chunks: Number of chunks.
        disk_bytes: Bytes that the database takes on disk.
        max_bytes: The greatest size that the database may reach.
        server_version: The version of the store.
        used_bytes: Bytes of the database that are in use; 0 if the store is older than this field.
        append_limit_bytes: The `used_bytes` at which the store is full; 0 if the store is older than this field.
        free_disk_bytes: Free bytes on the store's disk.
        why_full: Why the store refuses rows and new captures, in words; empty if it has room.
        retain_seconds: Seconds for which a capture is kept after it ended; None for ever.
        retain_bytes: The most bytes of chunks that are kept; None for no limit.
        expired_by_age: Captures deleted because of their age, since the store started.
        expired_by_size: Captures deleted because all together took too many bytes, since the store started.
        bytes_expired: Bytes of the chunks of these captures.
        server_time: The store's clock when it answered; None if the store is older than this field.
        store: The store's name.
        tenant: The tenant that the statistics are about; None if they are about the whole store, which only admins see.
            Other callers get only their tenant's captures and bytes.
        tenant_max_bytes: Bytes of chunks that the tenant may have in this store; None for no limit.
        tenant_max_open_captures: Captures that the tenant may have open in this store; None for no limit.
        archive_url: Where the store's archive is; empty if it has none. The following fields are then 0 or empty.
        archive_pending: Ended captures that are not in the archive yet.
        archive_not_copied: Those of them that cannot be copied, because a chunk is damaged. The store's log names them.
        archive_copied: Captures whose rows are in the store and in the archive.
        archive_moved: Captures whose rows are only in the archive. `num_bytes` does not count them.
        archive_behind: Why nothing can be copied at the moment, in words; empty if the archive works.
    """

    endpoint: str
    captures: dict[str, int]
    num_bytes: int
    num_chunks: int
    disk_bytes: int
    max_bytes: int
    server_version: str
    used_bytes: int = 0
    append_limit_bytes: int = 0
    free_disk_bytes: int = 0
    why_full: str = ""
    retain_seconds: float | None = None
    retain_bytes: int | None = None
    expired_by_age: int = 0
    expired_by_size: int = 0
    bytes_expired: int = 0
    server_time: datetime.datetime | None = None
    store: str = ""
    tenant: str | None = None
    tenant_max_bytes: int | None = None
    tenant_max_open_captures: int | None = None
    archive_url: str = ""
    archive_pending: int = 0
    archive_not_copied: int = 0
    archive_copied: int = 0
    archive_moved: int = 0
    archive_behind: str = ""

    @classmethod
    def from_proto(cls, store: StoreAddress, proto: store_pb2.GetStatsResponse) -> StoreStats:
        """Return the value of a message from a store."""
        retention, own, is_for_tenant = proto.retention, proto.tenant, proto.HasField("tenant")
        return cls(
            endpoint=store.endpoint,
            store=store.name,
            captures={STATES.get(item.state, "unknown"): item.count for item in proto.captures},
            num_bytes=proto.num_bytes,
            num_chunks=proto.num_chunks,
            disk_bytes=proto.disk_bytes,
            max_bytes=proto.max_bytes,
            server_version=proto.server_version,
            used_bytes=proto.used_bytes,
            append_limit_bytes=proto.append_limit_bytes,
            free_disk_bytes=proto.free_disk_bytes,
            why_full=proto.why_full,
            retain_seconds=retention.max_age.ToNanoseconds() / 1e9 if retention.HasField("max_age") else None,
            retain_bytes=retention.max_bytes or None,
            expired_by_age=retention.captures_expired_by_age,
            expired_by_size=retention.captures_expired_by_size,
            bytes_expired=retention.bytes_expired,
            server_time=to_datetime(proto.server_time),
            tenant=own.tenant if is_for_tenant else None,
            tenant_max_bytes=own.max_bytes if own.HasField("max_bytes") else None,
            tenant_max_open_captures=own.max_open_captures if own.HasField("max_open_captures") else None,
            archive_url=proto.archive.url,
            archive_pending=proto.archive.captures_pending,
            archive_not_copied=proto.archive.captures_not_copied,
            archive_copied=proto.archive.captures_copied,
            archive_moved=proto.archive.captures_moved,
            archive_behind=proto.archive.why_behind,
        )

    @classmethod
    def total(cls, stats: Iterable[StoreStats]) -> StoreStats:
        """Return the sum of several stores' statistics. The retention settings of the sum are left unset."""
        each = list(stats)
        sums = {name: sum(getattr(item, name) for item in each) for name in _SUMMED}
        captures = sum((Counter(item.captures) for item in each), Counter())
        full = "; ".join(f"{item.store}: {item.why_full}" for item in each if item.why_full)
        versions = ", ".join(sorted({item.server_version for item in each}))
        tenants = {item.tenant for item in each}
        tenant = tenants.pop() if len(tenants) == 1 else None
        return cls(
            store="total", endpoint="", captures=dict(captures), server_version=versions, tenant=tenant, why_full=full,
            **sums,
        )  # fmt: skip


_SUMMED = (
    "num_bytes", "num_chunks", "disk_bytes", "max_bytes", "used_bytes", "append_limit_bytes", "free_disk_bytes",
    "expired_by_age", "expired_by_size", "bytes_expired", "archive_pending", "archive_not_copied",
    "archive_copied", "archive_moved",
)  # fmt: skip
"""The statistics that are added up. Stores that share a disk each count its free bytes."""


@dataclass(frozen=True)
class Health:
    """Whether the services are ready: "SERVING", "NOT_SERVING" (loading or stopping) or "UNREACHABLE".

    Attributes:
        inference: The inference service; "" if the client was created with a store alone.
        stores: The status of each store by its endpoint; empty while the inference service does not name its stores.
    """

    inference: str
    stores: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether all services are serving."""
        inference = [self.inference] if self.inference else []
        return all(status == "SERVING" for status in (*inference, *self.stores.values()))
