"""Runs benchmarks that have several parts. The parts may be run one by one into the same file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import Machine, describe
from bench.output import Bar, write_result
from bench.processes import RunFailedError, measuring
from svc_common.launcher import ServiceFailedError

_KIND_OF_MACHINE = ("cpu", "cores", "gpu", "gpu_count", "gpu_driver")
"""The fields of a machine that must be equal for figures to share a file. Its load may differ."""


class Part(NamedTuple):
    """The outcome of one part."""

    data: dict[str, Any]
    lines: Iterable[str] = ()
    """The printed lines."""
    bars: Sequence[Bar] = ()
    failures: Sequence[str] = ()


class OtherRunError(RuntimeError):
    """A file contains figures of another revision or machine. The message says how they differ."""

    def __init__(self, message: str, differs: str) -> None:
        super().__init__(message)
        self.differs = differs
        """The difference, in a few words."""


def run_parts(
    benchmark: str, machine: Machine, names: Sequence[str], output: Path | None, measure: Callable[[str], Part]
) -> None:
    """Measure parts one after the other. Print and write each as soon as it is measured.

    A part that fails does not stop the others, but the process exits with an error at the end.

    Args:
        benchmark: The benchmark's name.
        machine: The machine that it runs on.
        names: The parts.
        output: The output file. It keeps its other parts if they are of the same revision and machine.
        measure: Measures one part. Raises RunFailedError or ServiceFailedError if it fails.
    """
    context = describe(machine)
    try:
        parts = read_earlier(output, benchmark, context) if output else {}
    except OtherRunError as error:
        sys.exit(str(error))
    failures = []
    with measuring():
        for name in names:
            load, started = os.getloadavg()[0], time.perf_counter()
            print(f"=== {name}", flush=True)
            try:
                part = measure(name)
            except (RunFailedError, ServiceFailedError) as error:
                failures.append(f"{name}: {error}")
                continue
            for line in (*part.lines, *(bar.line() for bar in part.bars)):
                print(line, flush=True)
            failures += [f"{name}: {failure}" for failure in part.failures]
            parts[name] = {
                **part.data,
                **({"bars": [bar.to_json() for bar in part.bars]} if part.bars else {}),
                "load_before": round(load, 2),
                "seconds": round(time.perf_counter() - started, 1),
            }
            if output:  # keep finished parts even if a later part fails
                write_result(output, {"benchmark": benchmark, **context, "parts": parts})
    if failures:
        sys.exit("\n".join(f"BENCH FAILED: {failure}" for failure in failures))


def read_earlier(file: Path, benchmark: str, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that a result file already contains; empty if there is no such file.

    Args:
        file: The output file.
        benchmark: The name of the benchmark.
        context: "machine", "versions" and "revision" of this run, and other fields that must be the same.
    """
    if not file.exists():
        return {}
    try:
        earlier = json.loads(file.read_text())
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict) or earlier.get("benchmark") != benchmark:
        difference = f"not a result of {benchmark}"
        raise OtherRunError(f"{file} is {difference}; choose another file.", difference)
    new = json.loads(json.dumps(context))  # JSON turns tuples into lists
    differences = [name for name in new if _comparable(name, earlier.get(name)) != _comparable(name, new[name])]
    if differences:
        differs = f"another {', another '.join(differences)}"
        message = f"{file} has figures measured with {differs}; remove it, or choose another file."
        raise OtherRunError(message, differs)
    return dict(earlier["parts"])


def _comparable(name: str, value: Any) -> Any:
    return [value.get(key) for key in _KIND_OF_MACHINE] if name == "machine" else value
