"""Facts about the served model and its engine, known once the engine runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from residuum.v1 import capture_pb2
from residuum.wire.limits import DEFAULT_PROJECTION, DEFAULT_TOPK
from residuum.wire.rows.encodings import RAW

if TYPE_CHECKING:
    from residuum.v1 import tensor_pb2


@dataclass(frozen=True)
class CaptureDefaults:
    """How rows are encoded if a request does not choose."""

    encoding: capture_pb2.Encoding.ValueType = RAW
    """The encoding."""
    projection: int = DEFAULT_PROJECTION
    """Dimensions of random projections, or the width of rows if that is less."""
    topk: int = DEFAULT_TOPK
    """How many of the largest elements are kept, or the width of rows if that is less."""


@dataclass(frozen=True)
class ModelFacts:
    """The served model: its shape, its limits, and what can be captured."""

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
    """How many sequences a replica runs at once."""
    sites: tuple[capture_pb2.Site.ValueType, ...]
    """The sites that requests can capture."""
    pool_bytes: int
    """Device memory for capture blocks, summed over ranks."""
    table_bytes: int
    """Device memory for vectors and programs, summed over ranks."""
    ring_bytes: int
    """Shared memory of the rings, summed over ranks."""
    control_paths: tuple[str, ...]
    """The control sockets of the rings, one for each rank that captures."""
    data_parallel_size: int = 1
    """How many replicas of the model the engine runs. Each has all ranks, and takes part of the requests."""
    model_runner: str = ""
    """vLLM's model runner: "v1" or "v2"."""
    folded_norms: int = 0
    """How many layers have their tap folded into the norm that follows."""
    encodings: tuple[capture_pb2.Encoding.ValueType, ...] = (capture_pb2.ENCODING_RAW,)
    """The encodings that a capture may use."""
    reductions: tuple[capture_pb2.Reduction.ValueType, ...] = (capture_pb2.REDUCTION_NONE,)
    """The reductions that a capture may use."""
    site_widths: tuple[int, ...] = ()
    """Elements of a row at each of `sites`; empty: `hidden_size` at all of them."""
    site_layers: tuple[tuple[int, ...], ...] = ()
    """The layers that have each of `sites`; empty: all layers have all of them."""
    steering_sites: tuple[capture_pb2.Site.ValueType, ...] = (capture_pb2.SITE_RESID_POST,)
    """The sites at which requests can steer rows."""
    probe_sites: tuple[capture_pb2.Site.ValueType, ...] = ()
    """The sites at which probes can read rows; empty: there are no probes."""
    sae_bytes: int = 0
    """How many bytes the encoders of sparse autoencoders may take; 0: there are none."""
    attention: tuple[dict[str, Any], ...] = ()
    """The fields of an `AttentionLayer` for each layer; empty if unknown."""
    adapters: tuple[str, ...] = ()
    """The names of the LoRA adapters that requests may choose."""
    max_logprobs: int = 20
    """How many of the most likely tokens a request may ask for with their log-probabilities."""
    capture_defaults: CaptureDefaults = field(default_factory=CaptureDefaults)
    """The encoding of rows if a request does not choose one."""

    def width(self, site: capture_pb2.Site.ValueType) -> int:
        """Return the elements of a row at a site of `sites` or `steering_sites`."""
        is_own = self.site_widths and site in self.sites
        return self.site_widths[self.sites.index(site)] if is_own else self.hidden_size

    def layers_at(self, site: capture_pb2.Site.ValueType) -> tuple[int, ...]:
        """Return the layers that have a site of `sites` or `steering_sites`."""
        is_own = self.site_layers and site in self.sites
        return self.site_layers[self.sites.index(site)] if is_own else tuple(range(self.num_layers))

    @property
    def vector_widths(self) -> tuple[int, ...]:
        """The elements that a steering vector may have: those of rows that can be steered, the hidden size first."""
        return tuple(dict.fromkeys((self.hidden_size, *map(self.width, self.steering_sites))))
