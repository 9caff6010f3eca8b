"""Capture and steer the residual stream of models served by vLLM, over gRPC.

Example:
    >>> import residuum
    >>> with residuum.Client("localhost:50051") as client:
    ...     joy = residuum.Vector.from_array(direction)  # float32 [hidden]
    ...     reply = client.generate(
    ...         "The weather today is",
    ...         max_tokens=64,
    ...         capture=residuum.Capture(layers="all"),
    ...         steer=[residuum.Add(joy, layer=12, scale=6.0)],
    ...     )
    ...     acts = client.activations(reply.request_id)
    ...     acts[12].shape
    (68, 576)

Public names are imported when they are first used. So the services can import `residuum.v1`, `residuum.wire` and
`residuum.rpc` without the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from residuum import directions, sae
    from residuum.aio import AsyncClient, AsyncStream, BatchCancelled
    from residuum.captures.archive import Archive
    from residuum.client import Client, Stream
    from residuum.directions.values import Directions
    from residuum.exceptions import (
        AbortedCapture,
        AlreadyExists,
        ArchiveUnreachable,
        BadCredentials,
        BadSAE,
        BadVector,
        BatchFailed,
        BatchInterrupted,
        CallerStalled,
        CaptureEnded,
        CaptureExists,
        CaptureNotComplete,
        ClientClosed,
        DamagedCapture,
        DeadlineExceeded,
        EmptyCaptureWarning,
        EmptyPrompt,
        EngineDead,
        ExtractStopped,
        IncompleteCapture,
        InvalidRequest,
        LeftOutWarning,
        LimitReached,
        MissingSAE,
        MissingVectors,
        NoMessageSpans,
        NoStore,
        NotFound,
        NoTokenTexts,
        NotServing,
        NotUpdatable,
        OpenCapture,
        OutageWarning,
        PermissionDenied,
        PromptTooLong,
        QuotaExceeded,
        RequestAborted,
        RequestExists,
        ResiduumError,
        ResourceExhausted,
        ServerFault,
        SilentStoreWarning,
        StoreFull,
        StoreFullCapture,
        StoreUnreachable,
        Unauthenticated,
        Unavailable,
        UnknownCapture,
        UnknownLayer,
        UnknownModel,
        UnknownOperation,
        UnknownRequest,
        UnknownSite,
        Unreachable,
    )
    from residuum.exports.job import Export
    from residuum.extraction.reader import Extracted, ExtractSummary, LayerRows
    from residuum.protocol.lens import LogitLens, Unembedding
    from residuum.protocol.patching import PatchSweep
    from residuum.protocol.reading import Piece
    from residuum.protocol.sampling import Sampling
    from residuum.rpc.credentials import TLS
    from residuum.serving import serve
    from residuum.values.activations import Activations
    from residuum.values.attention import AttentionLayer, attention_weights
    from residuum.values.capture import Capture
    from residuum.values.gates import Gate, GateRecord
    from residuum.values.lens import Lens, LensMap
    from residuum.values.logprobs import Logprobs
    from residuum.values.manifest import Manifest, RowSet, SequenceOutcome, SteeringChange, SteeringRecord
    from residuum.values.model_info import ModelInfo, ServiceLoad
    from residuum.values.probe_layers import ProbeAttention, ProbeLayer
    from residuum.values.probes import Probe
    from residuum.values.replies import (
        CapturePage,
        CaptureSummary,
        Health,
        PutResult,
        PutSAEResult,
        Registration,
        Reply,
        Sequence,
        StoreStats,
        TokenDelta,
        Usage,
    )
    from residuum.values.rows import Rows
    from residuum.values.rules import Rule, RuleEvent
    from residuum.values.sae import SAE
    from residuum.values.search import SearchHit, SearchResult
    from residuum.values.selections import Positions
    from residuum.values.smoothing import EMA, RollingMax, RollingMean
    from residuum.values.spans import MessageSpan
    from residuum.values.steering import Ablate, Add, Cap, ClampFeature, Multiply, Replace, Set
    from residuum.values.stored_row import StoredRow
    from residuum.values.vector import Vector, load_vectors
    from residuum.xargs import vllm_xargs

_MODULES = {
    "Lens": "residuum.values.lens",
    "LensMap": "residuum.values.lens",
    "LogitLens": "residuum.protocol.lens",
    "Unembedding": "residuum.protocol.lens",
    "PatchSweep": "residuum.protocol.patching",
    "Piece": "residuum.protocol.reading",
    "Sampling": "residuum.protocol.sampling",
    "Activations": "residuum.values.activations",
    "EMA": "residuum.values.smoothing",
    "RollingMax": "residuum.values.smoothing",
    "RollingMean": "residuum.values.smoothing",
    "SAE": "residuum.values.sae",
    "Rows": "residuum.values.rows",
    "Rule": "residuum.values.rules",
    "RuleEvent": "residuum.values.rules",
    "SearchHit": "residuum.values.search",
    "SearchResult": "residuum.values.search",
    "Archive": "residuum.captures.archive",
    "AsyncClient": "residuum.aio",
    "AsyncStream": "residuum.aio",
    "BatchCancelled": "residuum.aio",
    "Capture": "residuum.values.capture",
    "Client": "residuum.client",
    "Stream": "residuum.client",
    "Directions": "residuum.directions.values",
    "Export": "residuum.exports.job",
    "ExtractSummary": "residuum.extraction.reader",
    "Extracted": "residuum.extraction.reader",
    "LayerRows": "residuum.extraction.reader",
    "Logprobs": "residuum.values.logprobs",
    "Manifest": "residuum.values.manifest",
    "RowSet": "residuum.values.manifest",
    "SequenceOutcome": "residuum.values.manifest",
    "SteeringChange": "residuum.values.manifest",
    "SteeringRecord": "residuum.values.manifest",
    "CapturePage": "residuum.values.replies",
    "CaptureSummary": "residuum.values.replies",
    "Health": "residuum.values.replies",
    "AttentionLayer": "residuum.values.attention",
    "ModelInfo": "residuum.values.model_info",
    "ServiceLoad": "residuum.values.model_info",
    "Probe": "residuum.values.probes",
    "ProbeAttention": "residuum.values.probe_layers",
    "ProbeLayer": "residuum.values.probe_layers",
    "PutResult": "residuum.values.replies",
    "PutSAEResult": "residuum.values.replies",
    "Registration": "residuum.values.replies",
    "Reply": "residuum.values.replies",
    "Sequence": "residuum.values.replies",
    "StoreStats": "residuum.values.replies",
    "TokenDelta": "residuum.values.replies",
    "Usage": "residuum.values.replies",
    "TLS": "residuum.rpc.credentials",
    "serve": "residuum.serving",
    "Positions": "residuum.values.selections",
    "Gate": "residuum.values.gates",
    "GateRecord": "residuum.values.gates",
    "Ablate": "residuum.values.steering",
    "Add": "residuum.values.steering",
    "Cap": "residuum.values.steering",
    "ClampFeature": "residuum.values.steering",
    "Multiply": "residuum.values.steering",
    "Replace": "residuum.values.steering",
    "Set": "residuum.values.steering",
    "StoredRow": "residuum.values.stored_row",
    "MessageSpan": "residuum.values.spans",
    "Vector": "residuum.values.vector",
    "load_vectors": "residuum.values.vector",
    "attention_weights": "residuum.values.attention",
    "vllm_xargs": "residuum.xargs",
}
"""The module of each public name, apart from the exceptions."""

__all__ = [
    "EMA",
    "SAE",
    "TLS",
    "Ablate",
    "AbortedCapture",
    "Activations",
    "Add",
    "AlreadyExists",
    "Archive",
    "ArchiveUnreachable",
    "AsyncClient",
    "AsyncStream",
    "AttentionLayer",
    "BadCredentials",
    "BadSAE",
    "BadVector",
    "BatchCancelled",
    "BatchFailed",
    "BatchInterrupted",
    "CallerStalled",
    "Cap",
    "Capture",
    "CaptureEnded",
    "CaptureExists",
    "CaptureNotComplete",
    "CapturePage",
    "CaptureSummary",
    "ClampFeature",
    "Client",
    "ClientClosed",
    "DamagedCapture",
    "DeadlineExceeded",
    "Directions",
    "EmptyCaptureWarning",
    "EmptyPrompt",
    "EngineDead",
    "Export",
    "ExtractStopped",
    "ExtractSummary",
    "Extracted",
    "Gate",
    "GateRecord",
    "Health",
    "IncompleteCapture",
    "InvalidRequest",
    "LayerRows",
    "LeftOutWarning",
    "Lens",
    "LensMap",
    "LimitReached",
    "LogitLens",
    "Logprobs",
    "Manifest",
    "MessageSpan",
    "MissingSAE",
    "MissingVectors",
    "ModelInfo",
    "Multiply",
    "NoMessageSpans",
    "NoStore",
    "NoTokenTexts",
    "NotFound",
    "NotServing",
    "NotUpdatable",
    "OpenCapture",
    "OutageWarning",
    "PatchSweep",
    "PermissionDenied",
    "Piece",
    "Positions",
    "Probe",
    "ProbeAttention",
    "ProbeLayer",
    "PromptTooLong",
    "PutResult",
    "PutSAEResult",
    "QuotaExceeded",
    "Registration",
    "Replace",
    "Reply",
    "RequestAborted",
    "RequestExists",
    "ResiduumError",
    "ResourceExhausted",
    "RollingMax",
    "RollingMean",
    "RowSet",
    "Rows",
    "Rule",
    "RuleEvent",
    "Sampling",
    "SearchHit",
    "SearchResult",
    "Sequence",
    "SequenceOutcome",
    "ServerFault",
    "ServiceLoad",
    "Set",
    "SilentStoreWarning",
    "SteeringChange",
    "SteeringRecord",
    "StoreFull",
    "StoreFullCapture",
    "StoreStats",
    "StoreUnreachable",
    "StoredRow",
    "Stream",
    "TokenDelta",
    "Unauthenticated",
    "Unavailable",
    "Unembedding",
    "UnknownCapture",
    "UnknownLayer",
    "UnknownModel",
    "UnknownOperation",
    "UnknownRequest",
    "UnknownSite",
    "Unreachable",
    "Usage",
    "Vector",
    "__version__",
    "attention_weights",
    "directions",
    "load_vectors",
    "sae",
    "serve",
    "vllm_xargs",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'residuum' has no attribute {name!r}")
    if name in ("directions", "sae"):
        return importlib.import_module(f"residuum.{name}")  # the import also sets the attribute
    value = getattr(importlib.import_module(_MODULES.get(name, "residuum.exceptions")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("residuum")
    except metadata.PackageNotFoundError:
        return "0+source"  # a checkout that is not installed
