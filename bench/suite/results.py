"""The measurements of a suite by configuration, and the formulas of the isolated benchmark."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.suite.plan import ALL_LAYERS, BASELINE, NOOP, ZERO_LAYER

_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|NotFound)\b(?::.*)?)$")
_FOLLOWS = ("Engine core initialization failed", "EngineDeadError", "WorkerProc initialization failed", "cancelled")
"""Texts of vLLM's errors that only follow from an earlier error."""
_PATH = re.compile(r"(?:/[\w.+@-]+){2,}/")
_LONGEST = 300


@dataclass(frozen=True)
class Measured:
    """A configuration over all its processes. Times are in seconds, medians over all iterations."""

    name: str
    runs: tuple[dict[str, Any], ...]
    """The document of each process; see `bench.isolated.run.document`."""

    @property
    def peer(self) -> bool:
        """Whether another system than residuum captured."""
        return self.runs[0]["peer"] is not None

    @property
    def layers(self) -> int:
        """The number of captured layers."""
        return int(self.runs[0]["num_captured_layers"])

    @property
    def generation(self) -> float:
        """Seconds from the submission to the last token."""
        return self._median("generation_time") or 0.0

    @property
    def fetch(self) -> float | None:
        """Seconds from the last token until the client held every row; None if no client fetched."""
        return self._median("fetch_time")

    @property
    def total(self) -> float | None:
        """The sum of generation and fetch; None if no client fetched."""
        return None if self.fetch is None else self._median("total_time")

    @property
    def throughput(self) -> float:
        """Tokens per second of the generation, including prompts."""
        return self._median("throughput_tokens_per_sec") or 0.0

    @property
    def num_bytes(self) -> int:
        """The bytes captured in one iteration."""
        return int(self.runs[0]["iterations"][0]["bytes"])

    @property
    def last_over_first(self) -> float:
        """The last iteration of a process divided by its first, median over all processes. 1 if nothing accumulates."""
        return statistics.median(times[-1] / times[0] for times in self.times())

    def times(self, figure: str = "generation_time") -> list[list[float]]:
        """Return a figure of each iteration, grouped by process."""
        return [[item[figure] for item in run["iterations"]] for run in self.runs]

    def over(self, other: Measured) -> float:
        """Return the ratio of its generation to another's."""
        return self.generation / other.generation

    def by_round(self, other: Measured) -> list[float]:
        """Return the same ratio within each round that measured both."""
        theirs = {run["round"]: _median_time(run) for run in other.runs}
        return [_median_time(run) / theirs[run["round"]] for run in self.runs if run["round"] in theirs]

    def _median(self, figure: str) -> float | None:
        values = [value for times in self.times(figure) for value in times if value is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Formulas:
    """The formulas of the isolated benchmark. Overheads are relative to the baseline's generation."""

    zero_layer_overhead: float
    """(zero-layer - baseline) / baseline: the cost of having the taps."""
    noop_overhead: float | None
    """The same with ops that do nothing: the cost of having them in the graph. None if not measured."""
    generation_overhead: float
    """(all-layers - baseline) / baseline."""
    fetch_overhead: float
    """fetch / baseline."""
    total_overhead: float
    """generation_overhead + fetch_overhead."""
    per_layer_seconds: float
    """(all-layers - zero-layer) / layers."""

    @classmethod
    def of(cls, measured: Mapping[str, Measured]) -> Formulas | None:
        """Return the formulas' values; None if a required configuration was not measured."""
        if not {BASELINE, ZERO_LAYER, ALL_LAYERS} <= measured.keys():
            return None
        base, zero, every = (measured[name] for name in (BASELINE, ZERO_LAYER, ALL_LAYERS))
        fetch = (every.fetch or 0.0) / base.generation
        return cls(
            zero_layer_overhead=zero.over(base) - 1,
            noop_overhead=measured[NOOP].over(base) - 1 if NOOP in measured else None,
            generation_overhead=every.over(base) - 1,
            fetch_overhead=fetch,
            total_overhead=every.over(base) - 1 + fetch,
            per_layer_seconds=(every.generation - zero.generation) / every.layers,
        )


@dataclass(frozen=True)
class Line:
    """The least-squares line through generation times by the number of captured layers."""

    intercept: float
    """Seconds with no layer."""
    slope: float
    """Seconds for each layer."""
    worst: float
    """The largest distance of a measured time from the line, relative to the intercept."""

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line | None:
        """Return the line; None for fewer than three points."""
        if len(points) < 3:  # noqa: PLR2004 - two points are always on a line
            return None
        layers, times = (np.array(values, dtype=float) for values in zip(*points, strict=True))
        slope, intercept = np.polyfit(layers, times, 1)
        worst = np.abs(times - (intercept + slope * layers)).max() / intercept
        return cls(float(intercept), float(slope), float(worst))


def by_name(parts: Mapping[str, dict[str, Any]]) -> dict[str, Measured]:
    """Return the measured configurations by name, in the order of their first runs."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for part in parts.values():
        if "failed" not in part:
            runs.setdefault(part["name"], []).append(part)
    return {
        name: Measured(name, tuple(sorted(found, key=lambda run: int(run["round"])))) for name, found in runs.items()
    }


def failures(parts: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return the reasons of the configurations that failed, by name."""
    return {part["name"]: part["failed"] for part in parts.values() if "failed" in part}


def curve(measured: Mapping[str, Measured]) -> list[Measured]:
    """Return residuum's configurations with the same sink, by the number of layers from none to all."""
    ours = [item for item in measured.values() if not item.peer and item.name != NOOP]
    alike = [item for item in ours if item.name == ZERO_LAYER or (item.layers and item.fetch is not None)]
    return sorted(alike, key=lambda item: item.layers)


def _median_time(run: Mapping[str, Any]) -> float:
    return float(statistics.median(item["generation_time"] for item in run["iterations"]))


def reason(message: str, log: str) -> str:
    """Return the error that ended a process, from its log; otherwise `message`.

    Args:
        message: The reason if the log has no error.
        log: The full log.
    """
    found = [match[1].strip() for line in log.splitlines() if (match := _ERROR.search(line.rstrip()))]
    consequences = [index for index, line in enumerate(found) if any(word in line for word in _FOLLOWS)]
    # Errors after the first consequence only show how other processes ended.
    roots = found[: consequences[0]] if consequences else found
    text = (roots or found or [message.splitlines()[0]])[-1]
    return _PATH.sub("…/", text)[:_LONGEST]
