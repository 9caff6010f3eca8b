"""Rates of several ways, measured in turn in several rounds: their ratios round by round, and how they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.output import table


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest of some values."""
    return {
        "median": round(statistics.median(values), 4), "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
    }  # fmt: skip


def compared(unit: str, rates: Mapping[str, Sequence[float]], ours: str, other: str) -> dict[str, Any]:
    """Return the rates of all rounds, and the ratios of two ways round by round."""
    return {
        unit: {name: [round(rate, 3) for rate in found] for name, found in rates.items()},
        "ratio": spread(by_round(rates, ours, other)),
    }


def by_round(rates: Mapping[str, Sequence[float]], one: str, other: str) -> list[float]:
    """Return the ratios of two ways round by round."""
    return [first / second for first, second in zip(rates[one], rates[other], strict=True)]


def shown(unit: str, rates: Mapping[str, Sequence[float]], data: Mapping[str, Any]) -> str:
    """Return the rates, and the ratio that `compared` has found, for a terminal."""
    lines = [[name, f"{statistics.median(found):.1f}", f"{min(found):.1f}", f"{max(found):.1f}"]
             for name, found in rates.items()]  # fmt: skip
    ratio = data["ratio"]
    return (
        table([unit, "median", "lowest", "highest"], lines)
        + f"\nratio: {ratio['median']:.3f} ({ratio['lowest']:.3f} to {ratio['highest']:.3f})"
    )
