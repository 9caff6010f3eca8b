"""The configurations of a suite, and the order of their processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.capture.workload import Sink
from bench.isolated.configuration import Configuration, IsolatedMode, Peer, Tap

BASELINE, EAGER, ZERO_LAYER, NOOP = "baseline", "baseline, eager", "zero-layer", "zero-layer, noop taps"
ALL_LAYERS, TO_THE_RING = "all-layers", "all-layers, to the ring"


@dataclass(frozen=True)
class Entry:
    """One configuration of a suite."""

    name: str
    configuration: Configuration
    eager: bool = False
    """Whether the model is not compiled although the suite compiles."""
    sink: Sink | None = None
    """A sink other than the suite's; None for the suite's."""
    every_round: bool = False
    """Whether it is measured in each round, because others are compared with it; otherwise it is measured once."""


class Planned(NamedTuple):
    """One process."""

    round: int
    entry: Entry

    @property
    def key(self) -> str:
        """Its name in the result."""
        return f"{self.entry.name}, round {self.round + 1}"


def entries(num_layers: int, peers: Sequence[Peer] = tuple(Peer), *, eager: bool = False) -> list[Entry]:
    """Return the configurations for a model: 0, 1, 4, 16, ... and all of its layers, and the peers.

    Args:
        num_layers: The number of the model's layers.
        peers: The peers.
        eager: Whether the suite does not compile. Then stock with `enforce_eager` is the baseline itself.
    """
    every = Configuration(IsolatedMode.ALL_LAYERS)
    found = [Entry(BASELINE, Configuration(IsolatedMode.BASELINE), every_round=True)]
    if not eager:
        found.append(Entry(EAGER, Configuration(IsolatedMode.BASELINE), eager=True))
    found += [
        Entry(ZERO_LAYER, Configuration(IsolatedMode.ZERO_LAYER), every_round=True),
        Entry(NOOP, Configuration(IsolatedMode.ZERO_LAYER, tap=Tap.NOOP)),
    ]
    found += [
        Entry(_layers_name(count), Configuration(IsolatedMode.CUSTOM, spread(count, num_layers)))
        for count in powers_of_four_below(num_layers)
    ]
    found += [Entry(ALL_LAYERS, every, every_round=True), Entry(TO_THE_RING, every, sink=Sink.RING)]
    return found + [Entry(peer.value, Configuration(IsolatedMode.ALL_LAYERS, peer=peer)) for peer in peers]


def schedule(entries: Sequence[Entry], rounds: int) -> list[Planned]:
    """Return the order of the processes: forwards in even rounds, backwards in odd rounds, so that a drift cancels out.

    Entries that are measured only once are spread over the rounds.
    """
    dealt = {entry: index % rounds for index, entry in enumerate(item for item in entries if not item.every_round)}
    return [
        Planned(number, entry)
        for number in range(rounds)
        for entry in (entries if number % 2 == 0 else entries[::-1])
        if dealt.get(entry, number) == number
    ]


def powers_of_four_below(num_layers: int) -> list[int]:
    """Return the powers of four below a number: 1, 4, 16, ..."""
    return [4**power for power in range(num_layers.bit_length()) if 4**power < num_layers]


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """Return `count` layers that are evenly spread over a model."""
    return tuple((2 * index + 1) * num_layers // (2 * count) for index in range(count))


def _layers_name(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"
