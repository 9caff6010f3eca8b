"""What an isolated run writes."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.capture.results import Iteration, Run
    from bench.capture.workload import Workload
    from bench.isolated.configuration import Configuration

TIMES = ("generation_time", "fetch_time", "total_time", "throughput_tokens_per_sec")
_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.mean,
    "median": statistics.median,
    "min": min,
    "max": max,
}


def document(configuration: Configuration, workload: Workload, run: Run) -> dict[str, Any]:
    """Return a run as plain data: times in seconds, throughput in tokens a second, prompts counted with replies."""
    iterations = [_iteration(number, item) for number, item in enumerate(run.iterations, 1)]
    layers = workload.captured_layers(run.mode, run.num_layers)
    first = run.iterations[0]
    return {
        "mode": configuration.mode.value,
        "peer": configuration.peer.value if configuration.peer else None,
        "capture_machinery": "on" if configuration.machinery else "off",
        "tap": configuration.tap.value,
        "model": Path(workload.model).name,  # the name, not where it lies here
        "batch_size": workload.batch_size,
        "prefill_tokens": first.prompt_tokens // workload.batch_size,
        "decode_tokens": first.generated_tokens // workload.batch_size,
        "total_layers": run.num_layers,
        "capture_layers": list(layers),
        "num_captured_layers": len(layers),
        "round": run.round,
        "eager": workload.eager,
        "sink": workload.sink.value,
        "model_runner": run.model_runner,
        "device": run.device,
        "folded_norms": run.folded_norms,
        "start_seconds": run.start_seconds,
        "memory": asdict(run.memory),
        "iterations": iterations,
        "summary": summary(iterations),
    }


def summary(iterations: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return mean, median, min and max of each figure; None of one that was not measured."""
    found: dict[str, float | None] = {}
    for name in TIMES:
        values = [item[name] for item in iterations if item[name] is not None]
        for word, of in _STATISTICS.items():
            found[f"{word}_{name}"] = float(of(values)) if values else None
    return found


def _iteration(number: int, measured: Iteration) -> dict[str, Any]:
    generation = measured.generation_seconds
    fetched = measured.fetched_seconds
    # 0: there was nothing to fetch; None: there was, but it went no further than the ring.
    fetch = (None if measured.rows else 0.0) if fetched is None else fetched - generation
    return {
        "iteration": number,
        "generation_time": generation,
        "fetch_time": fetch,
        "total_time": generation + (fetch or 0.0),
        "throughput_tokens_per_sec": (measured.prompt_tokens + measured.generated_tokens) / generation,
        "completed_time": measured.completed_seconds,
        "rows": measured.rows,
        "bytes": measured.num_bytes,
    }
