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
    (67, 576)

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
    from residuum.extraction.results.reader import Extracted, ExtractSummary, LayerRows
    from residuum.protocol.captures.reading import Piece
    from residuum.protocol.generation.lens import LogitLens, Unembedding
    from residuum.protocol.generation.patching import PatchSweep
    from residuum.protocol.sampling import Sampling
    from residuum.rpc.credentials import TLS
    from residuum.serving import serve
    from residuum.values.captures.activations import Activations
    from residuum.values.captures.capture import Capture
    from residuum.values.captures.manifest import Manifest
    from residuum.values.captures.manifest_records import RowSet, SequenceOutcome, SteeringChange, SteeringRecord
    from residuum.values.captures.rows import Rows
    from residuum.values.captures.spans import MessageSpan
    from residuum.values.model.attention import AttentionLayer, attention_weights
    from residuum.values.model.info import ModelInfo, ServiceLoad
    from residuum.values.probes.layers import ProbeAttention, ProbeLayer
    from residuum.values.probes.probe import Probe
    from residuum.values.probes.rules import Rule, RuleEvent
    from residuum.values.probes.smoothing import EMA, RollingMax, RollingMean
    from residuum.values.replies.capture_summaries import CapturePage, CaptureSummary
    from residuum.values.replies.generation import Registration, Reply, Sequence, TokenDelta, Usage
    from residuum.values.replies.logprobs import Logprobs
    from residuum.values.replies.search import SearchHit, SearchResult
    from residuum.values.replies.service_status import Health, StoreStats
    from residuum.values.replies.uploads import PutResult, PutSAEResult
    from residuum.values.selections.layers_and_positions import Positions
    from residuum.values.steering.gates import Gate, GateRecord
    from residuum.values.steering.operations import Ablate, Add, Cap, ClampFeature, Multiply, Replace, Set
    from residuum.values.steering.stored_row import StoredRow
    from residuum.values.tensors.lens import Lens, LensMap
    from residuum.values.tensors.sae import SAE
    from residuum.values.tensors.vector import Vector, load_vectors
    from residuum.xargs import vllm_xargs

_MODULES = {
    "Lens": "residuum.values.tensors.lens",
    "LensMap": "residuum.values.tensors.lens",
    "LogitLens": "residuum.protocol.generation.lens",
    "Unembedding": "residuum.protocol.generation.lens",
    "PatchSweep": "residuum.protocol.generation.patching",
    "Piece": "residuum.protocol.captures.reading",
    "Sampling": "residuum.protocol.sampling",
    "Activations": "residuum.values.captures.activations",
    "EMA": "residuum.values.probes.smoothing",
    "RollingMax": "residuum.values.probes.smoothing",
    "RollingMean": "residuum.values.probes.smoothing",
    "SAE": "residuum.values.tensors.sae",
    "Rows": "residuum.values.captures.rows",
    "Rule": "residuum.values.probes.rules",
    "RuleEvent": "residuum.values.probes.rules",
    "SearchHit": "residuum.values.replies.search",
    "SearchResult": "residuum.values.replies.search",
    "Archive": "residuum.captures.archive",
    "AsyncClient": "residuum.aio",
    "AsyncStream": "residuum.aio",
    "BatchCancelled": "residuum.aio",
    "Capture": "residuum.values.captures.capture",
    "Client": "residuum.client",
    "Stream": "residuum.client",
    "Directions": "residuum.directions.values",
    "Export": "residuum.exports.job",
    "ExtractSummary": "residuum.extraction.results.reader",
    "Extracted": "residuum.extraction.results.reader",
    "LayerRows": "residuum.extraction.results.reader",
    "Logprobs": "residuum.values.replies.logprobs",
    "Manifest": "residuum.values.captures.manifest",
    "RowSet": "residuum.values.captures.manifest_records",
    "SequenceOutcome": "residuum.values.captures.manifest_records",
    "SteeringChange": "residuum.values.captures.manifest_records",
    "SteeringRecord": "residuum.values.captures.manifest_records",
    "CapturePage": "residuum.values.replies.capture_summaries",
    "CaptureSummary": "residuum.values.replies.capture_summaries",
    "Health": "residuum.values.replies.service_status",
    "AttentionLayer": "residuum.values.model.attention",
    "ModelInfo": "residuum.values.model.info",
    "ServiceLoad": "residuum.values.model.info",
    "Probe": "residuum.values.probes.probe",
    "ProbeAttention": "residuum.values.probes.layers",
    "ProbeLayer": "residuum.values.probes.layers",
    "PutResult": "residuum.values.replies.uploads",
    "PutSAEResult": "residuum.values.replies.uploads",
    "Registration": "residuum.values.replies.generation",
    "Reply": "residuum.values.replies.generation",
    "Sequence": "residuum.values.replies.generation",
    "StoreStats": "residuum.values.replies.service_status",
    "TokenDelta": "residuum.values.replies.generation",
    "Usage": "residuum.values.replies.generation",
    "TLS": "residuum.rpc.credentials",
    "serve": "residuum.serving",
    "Positions": "residuum.values.selections.layers_and_positions",
    "Gate": "residuum.values.steering.gates",
    "GateRecord": "residuum.values.steering.gates",
    "Ablate": "residuum.values.steering.operations",
    "Add": "residuum.values.steering.operations",
    "Cap": "residuum.values.steering.operations",
    "ClampFeature": "residuum.values.steering.operations",
    "Multiply": "residuum.values.steering.operations",
    "Replace": "residuum.values.steering.operations",
    "Set": "residuum.values.steering.operations",
    "StoredRow": "residuum.values.steering.stored_row",
    "MessageSpan": "residuum.values.captures.spans",
    "Vector": "residuum.values.tensors.vector",
    "load_vectors": "residuum.values.tensors.vector",
    "attention_weights": "residuum.values.model.attention",
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
