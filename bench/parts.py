"""Benchmarks of several parts, which may be run one by one into the same file."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.capture.processes import terminated_as_interrupted
from bench.children import RunFailedError
from bench.machine import Revision, versions
from bench.output import write_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bench.machine import Machine

_KIND_OF_MACHINE = ("cpu", "cores", "gpu", "gpu_count", "gpu_driver")
"""What of a machine must agree for figures to lie in one file: not how busy it was."""


class OtherRunError(RuntimeError):
    """A file holds what was measured of another revision, or on another machine. The message says how it differs."""

    def __init__(self, message: str, differs: str) -> None:
        """Say what to do, and how it differs."""
        super().__init__(message)
        self.differs = differs
        """How, in a few words."""


def run_parts(
    benchmark: str,
    machine: Machine,
    names: Sequence[str],
    output: Path | None,
    measure: Callable[[str], tuple[dict[str, Any], list[str]]],
) -> None:
    """Measure parts one after the other, and write each as soon as it is there. Ends the process if anything failed.

    Args:
        benchmark: The benchmark's name.
        machine: Where it runs.
        names: The parts.
        output: Where the result goes; what it holds of other parts stays, if it is of the same revision and machine.
        measure: Returns a part as plain data, and what failed in it. Raises RunFailedError if nothing came of it.
    """
    context = {"machine": asdict(machine), "versions": versions(), "revision": asdict(Revision.describe())}
    try:
        parts = read_earlier(output, benchmark, context) if output else {}
    except OtherRunError as error:
        sys.exit(str(error))
    failures = []
    try:
        with terminated_as_interrupted():
            for name in names:
                load, started = os.getloadavg()[0], time.perf_counter()
                try:
                    part, failed = measure(name)
                except RunFailedError as error:
                    failures.append(str(error))  # the other parts can do without this one
                    continue
                failures += failed
                seconds = time.perf_counter() - started
                parts[name] = {**part, "load_before": round(load, 2), "seconds": round(seconds, 1)}
                if output:  # what is measured stays, whatever comes after it
                    write_result(output, {"benchmark": benchmark, **context, "parts": parts})
    except KeyboardInterrupt:
        sys.exit(130)
    if failures:
        sys.exit("\n".join(f"BENCH FAILED: {failure}" for failure in failures))


def read_earlier(file: Path, benchmark: str, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that a file holds already; none if there is no such file.

    Args:
        file: Where the result goes.
        benchmark: Whose result.
        context: "machine", "versions" and "revision" of this run, and whatever else must be the same.

    Raises:
        OtherRunError: What it holds cannot stand beside what is measured now.
    """
    if not file.exists():
        return {}
    try:
        earlier = json.loads(file.read_text())
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict) or earlier.get("benchmark") != benchmark:
        raise OtherRunError(f"{file} is no result of {benchmark}; write to another file.", f"no result of {benchmark}")
    differences = [name for name, old, new in _compared(earlier, context) if old != new]
    if differences:
        differs = f"another {', another '.join(differences)}"
        raise OtherRunError(
            f"{file} holds what was measured with {differs}; remove it, or write to another file.", differs
        )
    return dict(earlier["parts"])


def _compared(earlier: Mapping[str, Any], context: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    old, new = ([item["machine"].get(name) for name in _KIND_OF_MACHINE] for item in (earlier, context))
    plain = json.loads(json.dumps(context))  # a tuple is a list in the file
    return [("machine", old, new), *((name, earlier.get(name), plain[name]) for name in plain if name != "machine")]
