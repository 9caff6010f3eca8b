"""What all tables share: how workloads, models and ratios are named."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.output import percent

_WIDTH = 118


def filled(text: str) -> str:
    """Return a paragraph in lines. Links stay whole: a target with a line break is no link."""
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False, break_long_words=False)


def over_stock(mode: Mapping[str, Any]) -> str:
    """Return how much longer a mode generates than stock vLLM, with the range of its rounds if there are several."""
    seconds = mode["generation_seconds"]
    return with_range(percent, seconds["ratio_to_stock"], seconds["ratio_by_round"])


def with_range(words: Callable[[float], str], value: float, rounds: Iterable[float]) -> str:
    """Return a figure, and in brackets the least and the greatest of its rounds if there are several."""
    least, *others = sorted(rounds)
    return f"{words(value)} ({words(least)} to {words(others[-1])})" if others else words(value)


def by_round(mode: Mapping[str, Any]) -> str:
    """Return the median of a mode's rounds, each over stock in the same round, and their range if there are several."""
    ratios = mode["generation_seconds"]["ratio_by_round"]
    return with_range(percent, statistics.median(ratios), ratios)


def workload_words(workload: Mapping[str, Any]) -> str:
    """Return the model and the requests of a workload."""
    requests = f"{workload['batch_size']} requests of {workload['prefill']} + {workload['decode']} tokens"
    return f"{model_words(workload)}, {requests}{', not compiled' if workload.get('eager') else ''}"


def model_words(workload: Mapping[str, Any]) -> str:
    """Return the name of a model, or of its shape if its weights were random."""
    name: str = workload["model"]
    return shape_words(name) if workload["engine_args"].get("load_format") == "dummy" else name


def shape_words(name: str) -> str:
    """Return the name of a shape, from that of an option."""
    return f"the shape of {name[0].upper()}{name[1:-1]}{name[-1].upper() if name[-2:-1].isdigit() else name[-1]}"
