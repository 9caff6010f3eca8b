"""The configuration of one isolated process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from bench.capture.workload import Mode, Sink, Workload


class BadConfigurationError(ValueError):
    """The configuration contradicts itself. The message says what to change."""


class IsolatedMode(str, Enum):
    """The layers that are captured."""

    BASELINE = "baseline"
    """None, with stock vLLM."""
    ZERO_LAYER = "zero-layer"
    """None, with residuum's worker and taps."""
    ALL_LAYERS = "all-layers"
    """Every layer of every token."""
    CUSTOM = "custom"
    """Some layers of every token."""

    @property
    def captures(self) -> bool:
        """Whether rows are captured."""
        return self in {IsolatedMode.ALL_LAYERS, IsolatedMode.CUSTOM}


class Tap(str, Enum):
    """What the taps' ops in the graph do."""

    FULL = "full"
    """The same as in the service."""
    NOOP = "noop"
    """Nothing, to measure the cost of the ops in the graph alone."""


class Peer(str, Enum):
    """Other systems that capture, each run as its users would; see `bench.peers`."""

    HOOKS = "hooks"
    """Eager vLLM with forward hooks: a slice and a clone for each request and layer, `torch.cat` for each token."""
    HOOKS_32 = "hooks-32"
    """The same, but with `torch.cat` once for 32 tokens."""
    EXTRACT = "extract-hidden-states"
    """vLLM's `extract_hidden_states` with its example connector and files in memory."""
    TRANSFORMERS = "transformers"
    """Hugging Face transformers with `output_hidden_states`."""
    NNSIGHT = "nnsight"
    """nnsight around the same transformers model."""
    VLLM_LENS = "vllm-lens"
    """vllm-lens, a plugin for vLLM."""


_MODES = {
    IsolatedMode.BASELINE: Mode.STOCK,
    IsolatedMode.ZERO_LAYER: Mode.IDLE,
    IsolatedMode.ALL_LAYERS: Mode.ALL_LAYERS,
    IsolatedMode.CUSTOM: Mode.CUSTOM,
}


@dataclass(frozen=True)
class Configuration:
    """One configuration."""

    mode: IsolatedMode
    layers: tuple[int, ...] = ()
    """The layers that CUSTOM captures, ascending."""
    machinery: bool = True
    """Whether residuum's worker runs; otherwise vLLM's own worker runs in every mode."""
    tap: Tap = Tap.FULL
    peer: Peer | None = None
    """The system that captures; None for residuum."""

    def __post_init__(self) -> None:
        custom = self.mode is IsolatedMode.CUSTOM
        if custom != bool(self.layers):
            raise BadConfigurationError(
                "Mode custom needs --layers, such as 0,5,10." if custom else "--layers belongs to mode custom."
            )
        if list(self.layers) != sorted(set(self.layers)) or any(layer < 0 for layer in self.layers):
            raise BadConfigurationError("--layers must be numbers from 0 on, ascending, each once.")
        if self.mode.captures and not self.machinery:
            raise BadConfigurationError(
                "Without the machinery nothing can be captured: use --machinery off only with baseline or zero-layer."
            )
        if self.tap is Tap.NOOP and (self.mode is not IsolatedMode.ZERO_LAYER or not self.machinery):
            raise BadConfigurationError("Taps that do nothing capture nothing: use --tap noop only with zero-layer.")
        if self.peer and not self.mode.captures:
            raise BadConfigurationError("A peer always captures: use --peer only with all-layers or custom.")

    @property
    def mode_of_capture(self) -> Mode:
        """The corresponding mode of `bench.capture`."""
        return _MODES[self.mode] if self.machinery else Mode.STOCK

    def workload(self, base: Workload) -> Workload:
        """Return the base workload with the fields that this configuration determines."""
        fetches = self.mode.captures and base.sink is Sink.STORE
        return dataclasses.replace(base, layers=self.layers, noop_taps=self.tap is Tap.NOOP, fetch=fetches)
