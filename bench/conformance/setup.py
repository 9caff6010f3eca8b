"""How the engine is set up for the architectures."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from bench.conformance.architectures import MAX_LENGTH, Architecture
from bench.conformance.results import Bounds
from bench.conformance.workload import CHUNK, MAX_REQUESTS

_GARBAGE = "bench.conformance.garbage.Garbage"
"""The worker extension that fills uninitialised memory. It is only named here, because importing its module has that
effect."""


@dataclass(frozen=True)
class Setup:
    """The setup of the engine, the same for every architecture."""

    dtype: str = "float32"
    eager: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    sites: tuple[str, ...] = ("resid_post",)
    kv_cache_gib: float = 0.1
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments for vLLM's engine."""
    garbage: bool = False
    """Whether the worker's uninitialised memory is filled with garbage."""

    quantization: str = ""
    """The format of the weights, one of `QUANTIZATIONS`; empty if they are not quantised. Then the reference is stock
    vLLM: it has only the stream, and no steered requests. Each request runs alone, because rounding depends on the
    batch, and quantised inputs enlarge it."""
    max_error: float = 0.0
    """The largest allowed error of a row; 0 for the default of the dtype."""
    alone: bool = False
    """Whether each request also runs alone, and its rows are compared bit by bit with those in the batch."""
    head_size: int = 0
    """The elements of each attention head; 0: those of the architecture's configuration."""
    changes: bool = False
    """Whether the steering of one more request changes while it generates."""
    kill: bool = False
    """Whether a worker is killed at the end, while requests are captured."""
    batch_invariant: bool = False
    """Whether vLLM runs in its batch-invariant mode. Then no bit may differ."""

    def bounds(self, architecture: Architecture) -> Bounds:
        """Return the bounds for an architecture's rows."""
        bounds = Bounds.of(self.dtype, self.max_error)
        max_error = self.max_error or max(bounds.max_error, architecture.max_error)
        return replace(bounds, max_error=max_error, same_bits=self.batch_invariant)

    def arguments(self) -> list[str]:
        """Return the inference service's flags."""
        engine_args = {**self.engine_args, "worker_extension_cls": _GARBAGE} if self.garbage else dict(self.engine_args)
        if self.data_parallel_size > 1:
            engine_args["data_parallel_size"] = self.data_parallel_size
        values = {
            "dtype": self.dtype,
            "tensor-parallel-size": self.tensor_parallel_size,
            "pipeline-parallel-size": self.pipeline_parallel_size,
            "kv-cache-gib": self.kv_cache_gib,
            "max-num-batched-tokens": CHUNK,
            "max-num-seqs": MAX_REQUESTS,
            "max-model-len": MAX_LENGTH,
            "ring-mib": 4,
            "engine-args": json.dumps(engine_args),
        }
        if self.sites != ("resid_post",):
            values["capture-sites"] = ",".join(self.sites)
        flags = [f"--{name}={value}" for name, value in values.items()]
        flags += ["--enforce-eager"] if self.eager else []
        return [*flags, "--no-fold-norms"] if self.quantization else flags  # the reference has vLLM's own norms

    def stock_arguments(self) -> dict[str, Any]:
        """Return the arguments for the engine of stock vLLM that computes the reference."""
        return {
            **{name: value for name, value in self.engine_args.items() if name != "data_parallel_size"},
            "dtype": self.dtype,
            "kv_cache_memory_bytes": int(self.kv_cache_gib * (1 << 30)),
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": MAX_REQUESTS,
            "max_model_len": MAX_LENGTH,
        }
