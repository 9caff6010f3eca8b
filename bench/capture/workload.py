"""What is run: the modes, the workload, and the order of the runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from residuum.wire.limits import DEFAULT_PROJECTION


class Mode(str, Enum):
    """One configuration of what is measured."""

    STOCK = "stock"
    """vLLM with its own worker."""
    IDLE = "idle"
    """Our worker with its taps in the model; nothing is captured, nothing steered."""
    ALL_LAYERS = "all-layers"
    """Every layer of every token is captured, at every site that is armed."""
    STEER = "steer"
    """Each request is steered after every layer, by the workload's `Vectors`."""
    ALL_LAYERS_STEER = "all-layers+steer"
    """Both."""
    ALL_LAYERS_ENCODED = "all-layers+encoded"
    """Every layer of every token is captured, encoded as the workload says instead of raw."""
    CUSTOM = "custom"
    """The workload's `layers` of every token are captured, at every site that is armed."""

    @property
    def captures(self) -> bool:
        """Whether rows are captured."""
        return self in {Mode.ALL_LAYERS, Mode.ALL_LAYERS_STEER, Mode.ALL_LAYERS_ENCODED, Mode.CUSTOM}

    @property
    def encodes(self) -> bool:
        """Whether captured rows are encoded."""
        return self is Mode.ALL_LAYERS_ENCODED

    @property
    def steers(self) -> bool:
        """Whether requests are steered."""
        return self in {Mode.STEER, Mode.ALL_LAYERS_STEER}


CHOICES = tuple(mode for mode in Mode if mode is not Mode.CUSTOM)
"""Those that every workload can be run in."""
USUAL_MODES = tuple(mode for mode in CHOICES if not mode.encodes)
"""Those that are run if nobody says which."""


class Sink(str, Enum):
    """Where captured rows go."""

    STORE = "store"
    """Through a shipper into a store, both processes of their own: what a user gets."""
    RING = "ring"
    """Into the shared-memory ring and no further: a local consumer counts them and frees their extents."""


class Runner(str, Enum):
    """vLLM's model runners."""

    DEFAULT = "default"
    """Whichever vLLM takes by itself."""
    V1 = "v1"
    V2 = "v2"

    @property
    def variable(self) -> str | None:
        """What VLLM_USE_V2_MODEL_RUNNER must say; None: nothing."""
        return {Runner.V1: "0", Runner.V2: "1"}.get(self)


class Vectors(str, Enum):
    """What steered requests are steered by: always an Add after every layer."""

    REQUEST = "request"
    """Each request by a vector of its own, the same after every layer."""
    LAYER = "layer"
    """After each layer by that layer's vector, the same for all requests."""


_LEAST_MODEL_LEN = 16


@dataclass(frozen=True)
class Workload:
    """What every run does."""

    model: str
    batch_size: int = 8
    prefill: int = 64
    """Tokens of each prompt."""
    decode: int = 64
    """Tokens that are generated for each prompt."""
    iterations: int = 3
    """Iterations that are measured, after the warm-up."""
    warmups: int = 1
    eager: bool = False
    sink: Sink = Sink.STORE
    vectors: Vectors = Vectors.REQUEST
    max_num_batched_tokens: int = 2048
    kv_cache_gib: float = 1.0
    ring_mib: int = 256
    shippers: int = 1
    stores: int = 1
    """Stores that the captures are spread over, each a process of its own."""
    capture_sites: tuple[str, ...] = ("resid_post",)
    """The sites that are armed, and that the modes which capture capture."""
    encoding: str = "rp8"
    """How the mode that encodes does it; see capture.proto."""
    dimensions: int = DEFAULT_PROJECTION
    """Its dimensions; 0 for an encoding that has none."""
    fold_norms: bool | None = None
    """Whether taps are folded into norms; None: as the service does by default."""
    layers: tuple[int, ...] = ()
    """What `Mode.CUSTOM` captures, ascending."""
    noop_taps: bool = False
    """The ops are in the graph, and everything around them runs, but they do nothing: what being there costs."""
    fetch: bool = False
    """Let a client fetch what was captured, which needs a store. This is measured, too."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, the same in every mode."""

    def shown(self) -> dict[str, Any]:
        """Return it as a result says it: with the model's name, not where that lies here."""
        return {**asdict(self), "model": Path(self.model).name}

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have: what the workload needs, and the self-test."""
        return max(self.prefill + self.decode, _LEAST_MODEL_LEN)

    @property
    def rows_per_request(self) -> int:
        """Positions that a request computes, each a row for a layer and site: the last token is never fed back."""
        return self.prefill + self.decode - 1

    def captured_layers(self, mode: Mode, num_layers: int) -> tuple[int, ...]:
        """Return the layers that a mode captures of a model."""
        if not mode.captures:
            return ()
        return self.layers if mode is Mode.CUSTOM else tuple(range(num_layers))

    def prompts(self, iteration: int, vocab_size: int) -> list[list[int]]:
        """Return the prompts of an iteration: random ids, no id twice in a prompt; the same in every mode and round."""
        source = random.Random(f"prompts {iteration}")  # noqa: S311 - repeatable, not secret
        return [source.sample(range(vocab_size), self.prefill) for _ in range(self.batch_size)]


@dataclass(frozen=True)
class Job:
    """What one process does, as it is told."""

    modes: tuple[Mode, ...]
    """Measured by turns on one engine: stock alone, or any of the others."""
    round: int
    workload: Workload
    folder: str
    """A private folder for sockets and the like."""
    runner: Runner = Runner.DEFAULT
    stores: tuple[str, ...] = ()
    """name=host:port of each store; none if none is needed."""
    profile: str = ""
    """The folder for a trace of torch's profiler, of one more iteration, which is not counted; empty: none."""

    @property
    def captures(self) -> bool:
        """Whether rows are captured in any mode."""
        return any(mode.captures for mode in self.modes)

    @property
    def needs_store(self) -> bool:
        """Whether captured rows go to a store."""
        return self.captures and self.workload.sink is Sink.STORE


class Turn(NamedTuple):
    """One process of a benchmark."""

    round: int
    runner: Runner
    modes: tuple[Mode, ...]


def schedule(
    modes: Sequence[Mode], rounds: int, runners: Sequence[Runner] = (Runner.DEFAULT,), *, shared: bool = False
) -> list[Turn]:
    """Return the order of the processes: forwards in even rounds, backwards in odd ones.

    So no mode is always the first after a pause, or always behind the same neighbour; a drift of the machine over the
    whole run cancels.

    Args:
        modes: The modes, in the order of the first round.
        rounds: How often each is run.
        runners: vLLM's model runners, with each of which all of that is done.
        shared: Let the modes with taps share a process, and so an engine.
    """
    groups: list[tuple[Mode, ...]] = [(mode,) for mode in modes]
    if shared:
        tapped = tuple(mode for mode in modes if mode is not Mode.STOCK)
        groups = [group for group in ((Mode.STOCK,) * (Mode.STOCK in modes), tapped) if group]
    order = [(runner, group) for runner in runners for group in groups]
    return [
        Turn(number, runner, group)
        for number in range(rounds)
        for runner, group in (order if number % 2 == 0 else order[::-1])
    ]


def turns(modes: Sequence[Mode], iterations: int) -> Iterator[tuple[int, Mode]]:
    """Yield the order of iterations in one process: each in every mode, forwards and backwards by turns."""
    for number in range(iterations):
        for mode in modes if number % 2 == 0 else reversed(modes):
            yield number, mode
