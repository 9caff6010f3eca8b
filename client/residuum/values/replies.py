"""What the inference service answers, as frozen Python values."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from residuum.v1 import inference_pb2, store_pb2
from residuum.values.capture import REDUCTIONS
from residuum.values.manifest import STATES, site_name, to_datetime
from residuum.values.vector import Vector
from residuum.wire.dtypes import dtype_name
from residuum.wire.encodings import ENCODING_NAMES, RAW
from residuum.wire.placement import StoreAddress


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of one sequence."""

    text: str
    """The new text; may be empty while a character is incomplete."""
    token_ids: tuple[int, ...]
    """The new token ids."""
    sequence: int = 0
    """The sequence; 0 unless n > 1."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Usage:
    """What a request took."""

    prompt_tokens: int
    """Tokens of the prompt."""
    generated_tokens: int
    """Tokens generated, all sequences together."""


@dataclass(frozen=True)
class Sequence:
    """One of the replies to a prompt."""

    text: str
    """The text."""
    token_ids: tuple[int, ...]
    """The generated token ids."""
    finish_reason: str
    """"stop" (end of sequence or a stop text) or "length"."""
    stop_reason: str = ""
    """The stop text that ended it; empty if none did."""


@dataclass(frozen=True)
class Reply:
    """What a prompt was answered."""

    request_id: str
    """The name of the request, and of its capture: `client.activations(reply.request_id)`."""
    prompt_token_ids: tuple[int, ...]
    """The prompt as the model saw it."""
    sequences: tuple[Sequence, ...]
    """The replies, as many as `n`."""
    usage: Usage
    """What it took."""
    captured: bool = False
    """Whether there is a capture to read."""
    store_endpoint: str = ""
    """The store that holds the capture."""

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated token ids of the first sequence."""
        return self.sequences[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first sequence ended: "stop" or "length"."""
        return self.sequences[0].finish_reason

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Registration:
    """A request that was validated and waits for its prompt."""

    request_id: str
    """The name of the request."""
    expire_time: datetime.datetime | None
    """When it lapses if it is not used."""
    time_to_live: float
    """Seconds until then, counted when it was answered."""
    vectors: tuple[Vector, ...] = field(default=(), repr=False)
    """The vectors it uses, so that they can be sent again should the server have dropped them."""


@dataclass(frozen=True)
class PutResult:
    """What `put_vectors` did."""

    digests: tuple[str, ...]
    """The digests of the vectors given, hexadecimal, in their order."""
    sent: int
    """How many vectors were sent: 0 if the server had them all."""
    bytes_sent: int
    """Bytes of vector values that were sent."""


@dataclass(frozen=True)
class ModelInfo:
    """What a server serves, and within which limits."""

    model: str
    """The model's name."""
    num_layers: int
    """Decoder layers, numbered from 0."""
    hidden_size: int
    """Elements in a row of the residual stream, and in a steering vector."""
    dtype: str
    """The element type in which the model computes rows, such as "bfloat16"."""
    sites: tuple[str, ...]
    """The capture sites that the server was started with."""
    steering_operations: tuple[str, ...]
    """The steering operations it knows."""
    max_model_len: int
    """Tokens in prompt and reply together."""
    limits: dict[str, int]
    """All limits by their names in the contract."""
    store_endpoints: tuple[str, ...]
    """Where clients reach the stores; empty: nothing is captured."""
    stores: dict[str, str]
    """The same by the stores' names."""
    tensor_parallel_size: int
    """Tensor parallel ranks."""
    pipeline_parallel_size: int
    """Pipeline parallel stages."""
    eager: bool
    """Whether the model runs without compiled graphs."""
    vllm_version: str
    """The version of vLLM."""
    server_version: str
    """The version of the server."""
    server_time: datetime.datetime | None = None
    """The server's clock when it answered. None: the server is older than this field."""
    encodings: tuple[str, ...] = ("raw",)
    """The encodings that a capture may ask for."""
    default_encoding: str = "raw"
    """How rows are encoded if a capture does not say so."""
    reductions: tuple[str, ...] = ("none",)
    """The reductions that a capture may ask for."""
    store_reachable: bool | None = None
    """Whether all stores answer the inference service; None: they were not asked (`check_store`), or there is none."""
    store_detail: str = ""
    """Where the inference service looked for the stores, and what it found."""

    @classmethod
    def from_proto(cls, proto: inference_pb2.GetModelInfoResponse) -> ModelInfo:
        """Return the value of a message."""
        checks = proto.store_checks or ([proto.store_check] if proto.HasField("store_check") else [])
        return cls(
            model=proto.model,
            num_layers=proto.num_layers,
            hidden_size=proto.hidden_size,
            dtype=dtype_name(proto.dtype),
            sites=tuple(site_name(site) for site in proto.sites),
            steering_operations=tuple(proto.steering_operations),
            max_model_len=proto.limits.max_model_len,
            limits={item.name: getattr(proto.limits, item.name) for item in proto.limits.DESCRIPTOR.fields},
            store_endpoints=tuple(proto.store_endpoints),
            stores={store.name: store.endpoint for store in proto.stores}
            or {endpoint: endpoint for endpoint in proto.store_endpoints},
            tensor_parallel_size=proto.layout.tensor_parallel_size,
            pipeline_parallel_size=proto.layout.pipeline_parallel_size,
            eager=proto.eager,
            vllm_version=proto.vllm_version,
            server_version=proto.server_version,
            server_time=to_datetime(proto.server_time),
            encodings=tuple(ENCODING_NAMES[number] for number in proto.encodings if number in ENCODING_NAMES),
            default_encoding=ENCODING_NAMES.get(proto.default_encoding or RAW, "unknown"),
            reductions=tuple(name for name, number in REDUCTIONS.items() if number in proto.reductions) or ("none",),
            store_reachable=not any(check.HasField("error") for check in checks) if checks else None,
            store_detail="; ".join(map(_store_detail, checks)),
        )


def _store_detail(check: inference_pb2.StoreCheck) -> str:
    if check.HasField("error"):
        return check.error.message
    name = f"at {check.endpoint}" if check.store in {"", check.endpoint} else f"{check.store} ({check.endpoint})"
    return f"the store {name}, version {check.server_version}, answers it"


@dataclass(frozen=True)
class CaptureSummary:
    """A capture in short, as `client.captures()` lists it."""

    capture_id: str
    """The capture, and its request."""
    model: str
    """The model."""
    state: str
    """"open", "complete", "incomplete" or "aborted"."""
    num_rows: int
    """Rows in the store, counted once for each layer and site."""
    num_bytes: int
    """Bytes of chunks in the store."""
    open_time: datetime.datetime | None
    """When it was opened."""
    end_time: datetime.datetime | None
    """When it ended."""
    store: str = ""
    """The name of the store that keeps it."""
    tenant: str = ""
    """Whose it is; empty: the default tenant's."""

    @classmethod
    def from_proto(cls, proto: store_pb2.CaptureSummary, store: str = "") -> CaptureSummary:
        """Return the value of a message, told by the store of that name."""
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
        )


@dataclass(frozen=True)
class CapturePage:
    """A part of the list of captures."""

    captures: tuple[CaptureSummary, ...]
    """The captures, newest first."""
    next_page_token: str
    """Where the list goes on; empty: this was the end."""


@dataclass(frozen=True)
class StoreStats:
    """What a store holds and has done."""

    endpoint: str
    """Where the store is reached."""
    captures: dict[str, int]
    """Captures by state."""
    num_bytes: int
    """Bytes of chunks."""
    num_chunks: int
    """Chunks."""
    disk_bytes: int
    """Bytes that the database takes on disk."""
    max_bytes: int
    """The greatest size it may grow to."""
    server_version: str
    """The version of the store."""
    used_bytes: int = 0
    """Bytes of the database that hold something. 0: not known, the store is older than this field."""
    append_limit_bytes: int = 0
    """What `used_bytes` may come to before the store is full. 0: not known."""
    free_disk_bytes: int = 0
    """Bytes that are free on its disk."""
    retain_seconds: float | None = None
    """How long after its end a capture is kept. None: for ever."""
    retain_bytes: int | None = None
    """How many bytes of chunks are kept. None: whatever fits."""
    expired_by_age: int = 0
    """Captures that were deleted because of their age, since the store started."""
    expired_by_size: int = 0
    """Captures that were deleted because there were too many bytes, since the store started."""
    bytes_expired: int = 0
    """Bytes of the chunks of both."""
    server_time: datetime.datetime | None = None
    """The store's clock when it answered. None: the store is older than this field."""
    store: str = ""
    """The store's name."""
    tenant: str | None = None
    """Whom the figures are of: who is no admin is told of their own captures and bytes, and no more. None: of the whole
    store."""
    tenant_max_bytes: int | None = None
    """Bytes of chunks that the tenant may have there. None: any number."""
    tenant_max_open_captures: int | None = None
    """Captures that the tenant may have open there. None: any number."""

    @classmethod
    def from_proto(cls, store: StoreAddress, proto: store_pb2.GetStatsResponse) -> StoreStats:
        """Return the value of a message that a store sent."""
        retention, own, told = proto.retention, proto.tenant, proto.HasField("tenant")
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
            retain_seconds=retention.max_age.ToNanoseconds() / 1e9 if retention.HasField("max_age") else None,
            retain_bytes=retention.max_bytes or None,
            expired_by_age=retention.captures_expired_by_age,
            expired_by_size=retention.captures_expired_by_size,
            bytes_expired=retention.bytes_expired,
            server_time=to_datetime(proto.server_time),
            tenant=own.tenant if told else None,
            tenant_max_bytes=own.max_bytes if own.HasField("max_bytes") else None,
            tenant_max_open_captures=own.max_open_captures if own.HasField("max_open_captures") else None,
        )

    @classmethod
    def total(cls, stats: Iterable[StoreStats]) -> StoreStats:
        """Return what several stores hold and have done together; what each keeps for how long is left open."""
        each = list(stats)
        sums = {name: sum(getattr(item, name) for item in each) for name in _SUMMED}
        captures = sum((Counter(item.captures) for item in each), Counter())
        versions = ", ".join(sorted({item.server_version for item in each}))
        tenants = {item.tenant for item in each}
        tenant = tenants.pop() if len(tenants) == 1 else None
        return cls(store="total", endpoint="", captures=dict(captures), server_version=versions, tenant=tenant, **sums)


_SUMMED = (
    "num_bytes", "num_chunks", "disk_bytes", "max_bytes", "used_bytes", "append_limit_bytes", "free_disk_bytes",
    "expired_by_age", "expired_by_size", "bytes_expired",
)  # fmt: skip
"""The figures of stores that can be added up. Stores on one disk each count what is free on it."""


@dataclass(frozen=True)
class Health:
    """Whether the services are ready: "SERVING", "NOT_SERVING" (loading or stopping) or "UNREACHABLE"."""

    inference: str
    """The inference service."""
    stores: dict[str, str]
    """Each store by its endpoint; empty while the inference service does not say where they are."""

    @property
    def ok(self) -> bool:
        """Whether all of them serve."""
        return all(status == "SERVING" for status in (self.inference, *self.stores.values()))
