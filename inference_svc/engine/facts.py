"""What is served, as the engine has it when it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference_svc.admission.captures import CaptureDefaults
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from residuum.v1 import tensor_pb2


@dataclass(frozen=True)
class ModelFacts:
    """What is served."""

    name: str
    num_layers: int
    hidden_size: int
    dtype: tensor_pb2.DataType.ValueType
    max_model_len: int
    vocab_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    eager: bool
    vllm_version: str
    max_num_seqs: int
    sites: tuple[capture_pb2.Site.ValueType, ...]
    """The sites that can be captured."""
    pool_bytes: int
    """Device memory for capture blocks, all ranks together."""
    table_bytes: int
    """Device memory for vectors and programs, all ranks together."""
    ring_bytes: int
    """Shared memory of the rings, all ranks together."""
    control_paths: tuple[str, ...]
    """The control sockets of the rings, one for each rank that captures."""
    model_runner: str = ""
    """Which of vLLM's model runners runs: "v1" or "v2"."""
    folded_norms: int = 0
    """Layers whose tap is folded into the norm that follows."""
    encodings: tuple[capture_pb2.Encoding.ValueType, ...] = (capture_pb2.ENCODING_RAW,)
    """The encodings that a capture may ask for."""
    reductions: tuple[capture_pb2.Reduction.ValueType, ...] = (capture_pb2.REDUCTION_NONE,)
    """The reductions that a capture may ask for."""
    capture_defaults: CaptureDefaults = field(default_factory=CaptureDefaults)
    """How rows are encoded if a request does not say so."""
