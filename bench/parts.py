"""Benchmarks of several parts, which may be run one by one into the same file."""

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
"""What of a machine must agree for figures to lie in one file: not how busy it was."""


class Part(NamedTuple):
    """What came of one part."""

    data: dict[str, Any]
    lines: Iterable[str] = ()
    """What is printed."""
    bars: Sequence[Bar] = ()
    failures: Sequence[str] = ()


class OtherRunError(RuntimeError):
    """A file holds what was measured of another revision, or on another machine. The message says how it differs."""

    def __init__(self, message: str, differs: str) -> None:
        super().__init__(message)
        self.differs = differs
        """How, in a few words."""


def run_parts(
    benchmark: str, machine: Machine, names: Sequence[str], output: Path | None, measure: Callable[[str], Part]
) -> None:
    """Measure parts one after the other; print each, and write it as soon as it is there.

    Ends the process if anything failed; the other parts are measured all the same.

    Args:
        benchmark: The benchmark's name.
        machine: Where it runs.
        names: The parts.
        output: Where the result goes; what it holds of other parts stays, if it is of the same revision and machine.
        measure: Measures one. Raises RunFailedError or ServiceFailedError if nothing came of it.
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
            if output:  # what is measured stays, whatever comes after it
                write_result(output, {"benchmark": benchmark, **context, "parts": parts})
    if failures:
        sys.exit("\n".join(f"BENCH FAILED: {failure}" for failure in failures))


def read_earlier(file: Path, benchmark: str, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that a file holds already; none if there is no such file.

    Args:
        file: Where the result goes.
        benchmark: Whose result.
        context: "machine", "versions" and "revision" of this run, and whatever else must be the same.
    """
    if not file.exists():
        return {}
    try:
        earlier = json.loads(file.read_text())
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict) or earlier.get("benchmark") != benchmark:
        raise OtherRunError(f"{file} is no result of {benchmark}; write to another file.", f"no result of {benchmark}")
    new = json.loads(json.dumps(context))  # a tuple is a list in the file
    differences = [name for name in new if _comparable(name, earlier.get(name)) != _comparable(name, new[name])]
    if differences:
        differs = f"another {', another '.join(differences)}"
        message = f"{file} holds what was measured with {differs}; remove it, or write to another file."
        raise OtherRunError(message, differs)
    return dict(earlier["parts"])


def _comparable(name: str, value: Any) -> Any:
    return [value.get(key) for key in _KIND_OF_MACHINE] if name == "machine" else value
