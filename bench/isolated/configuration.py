"""What one isolated process measures."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from bench.capture.workload import Mode, Sink, Workload


class BadConfigurationError(ValueError):
    """What was asked for contradicts itself. The message says what to change."""


class IsolatedMode(str, Enum):
    """What is captured."""

    BASELINE = "baseline"
    """Nothing, and nothing is installed that could: stock vLLM."""
    ZERO_LAYER = "zero-layer"
    """Nothing, though everything is installed."""
    ALL_LAYERS = "all-layers"
    """Every layer of every token."""
    CUSTOM = "custom"
    """Some layers of every token."""

    @property
    def captures(self) -> bool:
        """Whether rows are captured."""
        return self in {IsolatedMode.ALL_LAYERS, IsolatedMode.CUSTOM}


class Tap(str, Enum):
    """What the ops in the graph do."""

    FULL = "full"
    """What the service's do."""
    NOOP = "noop"
    """Nothing: what it costs that they are there."""


class Peer(str, Enum):
    """Other ways to capture, each as its users would run it; see `bench.peers`."""

    HOOKS = "hooks"
    """Eager vLLM with forward hooks: slice and clone for each request and layer, `torch.cat` for each token."""
    HOOKS_32 = "hooks-32"
    """The same, but `torch.cat` for 32 tokens at once."""
    EXTRACT = "extract-hidden-states"
    """vLLM's own `extract_hidden_states` with its example connector, whose files lie in memory."""
    TRANSFORMERS = "transformers"
    """Hugging Face transformers with `output_hidden_states`."""
    NNSIGHT = "nnsight"
    """nnsight around the same transformers model."""
    VLLM_LENS = "vllm-lens"
    """vllm-lens, a plugin of vLLM."""


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
    """What CUSTOM captures, ascending."""
    machinery: bool = True
    """Whether our worker runs; else vLLM's own, whatever the mode."""
    tap: Tap = Tap.FULL
    peer: Peer | None = None
    """Who captures; None: we."""

    def __post_init__(self) -> None:
        custom = self.mode is IsolatedMode.CUSTOM
        if custom != bool(self.layers):
            raise BadConfigurationError(
                "Mode custom needs --layers, such as 0,5,10." if custom else "--layers belongs to mode custom."
            )
        if list(self.layers) != sorted(set(self.layers)) or any(layer < 0 for layer in self.layers):
            raise BadConfigurationError("--layers are numbers from 0 on, ascending, each once.")
        if self.mode.captures and not self.machinery:
            raise BadConfigurationError(
                "Without the machinery nothing can be captured: use it with baseline or zero-layer."
            )
        if self.tap is Tap.NOOP and (self.mode is not IsolatedMode.ZERO_LAYER or not self.machinery):
            raise BadConfigurationError("A tap that does nothing captures nothing: use --tap noop with zero-layer.")
        if self.peer and not self.mode.captures:
            raise BadConfigurationError("A peer captures: use it with all-layers or custom.")

    @property
    def mode_of_capture(self) -> Mode:
        """The mode of `bench.capture` that this is."""
        return _MODES[self.mode] if self.machinery else Mode.STOCK

    def workload(self, base: Workload) -> Workload:
        """Return a workload with what this configuration decides."""
        fetches = self.mode.captures and base.sink is Sink.STORE
        return dataclasses.replace(base, layers=self.layers, noop_taps=self.tap is Tap.NOOP, fetch=fetches)
