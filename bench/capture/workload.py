"""The modes, the workload, and the order of the runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from bench.capture.baton import Baton
from residuum.wire.limits import DEFAULT_PROJECTION


class Mode(str, Enum):
    """One configuration of the engine and its requests."""

    STOCK = "stock"
    """Stock vLLM with its own worker."""
    STOCK_AGAIN = "stock-again"
    """Stock vLLM in another process, compared with `STOCK`: the difference is the benchmark's own error."""
    IDLE = "idle"
    """residuum's worker with taps in the model. Nothing is captured or steered."""
    ALL_LAYERS = "all-layers"
    """Every token is captured at every layer and every enabled site."""
    STEER = "steer"
    """Each request is steered after every layer with the workload's `Vectors`."""
    ALL_LAYERS_STEER = "all-layers+steer"
    """Both."""
    ALL_LAYERS_ENCODED = "all-layers+encoded"
    """Every token is captured at every layer, with the workload's encoding instead of raw."""
    CUSTOM = "custom"
    """Every token is captured at the workload's `layers` and every enabled site."""

    @property
    def tapped(self) -> bool:
        """Whether the engine has residuum's worker."""
        return self not in {Mode.STOCK, Mode.STOCK_AGAIN}

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
"""The modes that every workload can run in."""
USUAL_MODES = tuple(mode for mode in CHOICES if not mode.encodes and mode is not Mode.STOCK_AGAIN)
"""The modes that run by default."""


class Sink(str, Enum):
    """Where captured rows go."""

    STORE = "store"
    """Through shippers into stores, each a separate process, as in a deployment."""
    RING = "ring"
    """Only into the shared-memory ring. A local consumer counts the rows and frees their extents."""


class Runner(str, Enum):
    """vLLM's model runners."""

    DEFAULT = "default"
    """vLLM's choice."""
    V1 = "v1"
    V2 = "v2"
    BATCH_INVARIANT = "batch-invariant"
    """vLLM's choice, in its batch-invariant mode."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that select it."""
        chosen = {
            Runner.V1: {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            Runner.V2: {"VLLM_USE_V2_MODEL_RUNNER": "1"},
            Runner.BATCH_INVARIANT: {"VLLM_BATCH_INVARIANT": "1"},
        }
        return chosen.get(self, {})


class Vectors(str, Enum):
    """The vectors of steered requests. The operation is always an Add after every layer."""

    REQUEST = "request"
    """Each request has its own vector, the same after every layer."""
    LAYER = "layer"
    """Each layer has its own vector, the same for all requests."""


_LEAST_MODEL_LEN = 16


@dataclass(frozen=True)
class Workload:
    """The work of every run."""

    model: str
    batch_size: int = 8
    prefill: int = 64
    """Tokens in each prompt."""
    decode: int = 64
    """Tokens that are generated for each prompt."""
    iterations: int = 3
    """Measured iterations, after one warm-up."""
    warmups: int = 1
    at_once: bool = False
    """Whether the engine begins when it has all requests of an iteration."""
    eager: bool = False
    sink: Sink = Sink.STORE
    vectors: Vectors = Vectors.REQUEST
    max_num_batched_tokens: int = 2048
    kv_cache_gib: float = 1.0
    ring_mib: int = 256
    shippers: int = 1
    stores: int = 1
    """Stores that the captures are spread over, each a separate process."""
    capture_sites: tuple[str, ...] = ("resid_post",)
    """The sites that are enabled, and that capturing modes capture."""
    encoding: str = "rp8"
    """The encoding of ALL_LAYERS_ENCODED; see capture.proto."""
    dimensions: int = DEFAULT_PROJECTION
    """Dimensions of the encoding; 0 if it has none."""
    fold_norms: bool | None = None
    """Whether taps are folded into norms; None for the service's default."""
    layers: tuple[int, ...] = ()
    """The layers that `Mode.CUSTOM` captures, ascending."""
    noop_taps: bool = False
    """Use taps that do nothing, to measure the cost of the ops in the graph alone."""
    fetch: bool = False
    """Whether a client fetches the captured rows, which needs a store. This time is measured too."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments for vLLM's engine, the same in every mode."""

    def shown(self) -> dict[str, Any]:
        """Return the workload as plain data for a result, with the model's name instead of its path."""
        return {**asdict(self), "model": Path(self.model).name}

    @property
    def max_model_len(self) -> int:
        """The context length: enough for the workload and for the self-test."""
        return max(self.prefill + self.decode, _LEAST_MODEL_LEN)

    @property
    def rows_per_request(self) -> int:
        """Positions that a request computes: one row for each layer and site. The last token is never fed back."""
        return self.prefill + self.decode - 1

    def captured_layers(self, mode: Mode, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a model that a mode captures."""
        if not mode.captures:
            return ()
        return self.layers if mode is Mode.CUSTOM else tuple(range(num_layers))

    def prompts(self, iteration: int, vocab_size: int) -> list[list[int]]:
        """Return the prompts of an iteration: random IDs without repetition, the same in every mode and round."""
        source = random.Random(f"prompts {iteration}")  # noqa: S311 - repeatable, not secret
        return [source.sample(range(vocab_size), self.prefill) for _ in range(self.batch_size)]


@dataclass(frozen=True)
class Job:
    """The task of one process, which it gets as JSON."""

    modes: tuple[Mode, ...]
    """The modes that are measured alternately on one engine: one without taps alone, or any of the others."""
    round: int
    workload: Workload
    folder: str
    """A private folder for sockets and other temporary files."""
    runner: Runner = Runner.DEFAULT
    stores: tuple[str, ...] = ()
    """name=host:port of each store; empty if the job needs none."""
    profile: str = ""
    """The folder for a trace of torch's profiler, made in one more iteration that is not measured; empty for none."""
    baton: Baton = field(default_factory=Baton)
    """Says when to measure, if another process of the round runs at the same time."""

    @property
    def captures(self) -> bool:
        """Whether any mode captures rows."""
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
    """Return the order of the processes: forwards in even rounds, backwards in odd rounds.

    So no mode always comes first, or always after the same other mode, and a slow drift of the machine cancels out.

    Args:
        modes: The modes, in the order of the first round.
        rounds: The number of runs of each mode.
        runners: vLLM's model runners. Everything is repeated with each.
        shared: Whether the modes with taps share a process and so an engine.
    """
    groups: list[tuple[Mode, ...]] = [(mode,) for mode in modes]
    if shared:
        tapped = tuple(mode for mode in modes if mode.tapped)
        groups = [group for group in groups if not group[0].tapped] + [tapped] * bool(tapped)
    order = [(runner, group) for runner in runners for group in groups]
    return [
        Turn(number, runner, group)
        for number in range(rounds)
        for runner, group in (order if number % 2 == 0 else order[::-1])
    ]


def iterations_per_turn(iterations: int) -> int:
    """Return how many iterations an engine runs before the next engine has its turn: up to four.

    Each turn begins with a warm-up, which would take most of the time if turns were shorter. There are at least four
    turns if there are as many iterations, so that a drift of the machine affects all engines.
    """
    return min(4, max(1, iterations // 4))


def turns(modes: Sequence[Mode], iterations: int) -> Iterator[tuple[int, Mode]]:
    """Yield the order of iterations in one process: each in every mode, alternately forwards and backwards."""
    for number in range(iterations):
        for mode in modes if number % 2 == 0 else reversed(modes):
            yield number, mode
