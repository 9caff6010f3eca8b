"""What is run: the modes, the workload, and the order of the runs."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Mode(str, Enum):
    """One configuration of what is measured."""

    STOCK = "stock"
    """vLLM with its own worker."""
    IDLE = "idle"
    """Our worker with its taps in the model; nothing is captured, nothing steered."""
    ALL_LAYERS = "all-layers"
    """Every layer of every token is captured."""
    STEER = "steer"
    """Each request is steered after every layer, by a vector of its own."""
    ALL_LAYERS_STEER = "all-layers+steer"
    """Both."""

    @property
    def captures(self) -> bool:
        """Whether rows are captured."""
        return self in {Mode.ALL_LAYERS, Mode.ALL_LAYERS_STEER}

    @property
    def steers(self) -> bool:
        """Whether requests are steered."""
        return self in {Mode.STEER, Mode.ALL_LAYERS_STEER}


class Sink(str, Enum):
    """Where captured rows go."""

    STORE = "store"
    """Through a shipper into a store, both processes of their own: what a user gets."""
    RING = "ring"
    """Into the shared-memory ring and no further: a local consumer counts them and frees their extents."""


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
    kv_cache_gib: float = 1.0
    ring_mib: int = 256
    shippers: int = 1
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, the same in every mode."""

    @property
    def rows_per_request(self) -> int:
        """Positions that a request computes: the last generated token is never fed back."""
        return self.prefill + self.decode - 1

    def prompts(self, iteration: int, vocab_size: int) -> list[list[int]]:
        """Return the prompts of an iteration: random ids, no id twice in a prompt; the same in every mode and round."""
        source = random.Random(f"prompts {iteration}")  # noqa: S311 - repeatable, not secret
        return [source.sample(range(vocab_size), self.prefill) for _ in range(self.batch_size)]


@dataclass(frozen=True)
class Job:
    """One run, as its process is told."""

    mode: Mode
    round: int
    workload: Workload
    folder: str
    """A private folder for sockets and the like."""
    store: str = ""
    """host:port of the store; empty if none is needed."""

    @property
    def needs_store(self) -> bool:
        """Whether captured rows go to a store."""
        return self.mode.captures and self.workload.sink is Sink.STORE

    def to_json(self) -> dict[str, Any]:
        """Return the job as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Return the job that `to_json` made plain."""
        workload = Workload(**{**data["workload"], "sink": Sink(data["workload"]["sink"])})
        return cls(**{**data, "mode": Mode(data["mode"]), "workload": workload})


def schedule(modes: list[Mode], rounds: int) -> list[tuple[int, Mode]]:
    """Return the order of the runs: forwards in even rounds, backwards in odd ones.

    So no mode is always the first after a pause, or always behind the same neighbour; a drift of the machine over the
    whole run cancels.
    """
    return [(number, mode) for number in range(rounds) for mode in (modes if number % 2 == 0 else modes[::-1])]
