"""`python -m bench.isolated.trace FOLDER...`: where the time of traced iterations goes, on the device or before it.

Each folder is one of `bench.isolated --profile`. The *main stream* is the one with the most kernels: the model's. It is
busy, or it has a gap: then the device waits for the host, or for another stream.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.output import table

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LONG_US = 100.0
"""From this many microseconds on, a gap is long. Between kernels of one CUDA graph there are a few."""

Span = tuple[float, float]
"""Start and end in microseconds."""


class NoKernelsError(ValueError):
    """There is no trace, or it has nothing that ran on a GPU."""


@dataclass(frozen=True)
class Timeline:
    """What ran on a device. All times are in microseconds."""

    busy: float
    """The main stream's busy time."""
    gaps: tuple[Span, ...]
    """Between its first and its last kernel, when it was not busy."""
    others: tuple[Span, ...]
    """The busy times of all other streams together, ascending, without overlaps."""

    @property
    def long_gaps(self) -> list[Span]:
        """The gaps of at least LONG_US."""
        return [gap for gap in self.gaps if gap[1] - gap[0] >= LONG_US]

    def row(self, name: str) -> tuple[str, ...]:
        """Return the row of the printed table."""
        long = self.long_gaps
        figures = (self.busy, _length(self.gaps), _length(long), shared(long, self.others), _length(self.others))
        return (name, *(f"{value / 1e3:.1f}" for value in figures), str(len(long)))


HEAD = ("trace", "busy, ms", "gaps", "long gaps", "of these with other streams", "other streams", "number of long gaps")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each trace."""
    parser = argparse.ArgumentParser(prog="python -m bench.isolated.trace", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders with traces of --profile")
    try:
        rows = [row for folder in parser.parse_args(arguments).folders for row in _rows(folder)]
    except NoKernelsError as error:
        sys.exit(str(error))
    print(table(HEAD, rows))


def _rows(folder: Path) -> list[tuple[str, ...]]:
    """Return a row for each rank's trace in a folder."""
    files = sorted(folder.glob("*.json.gz"))
    if not files:
        raise NoKernelsError(f"{folder} has no traces. Make one with bench.isolated --profile {folder}.")
    return [timeline(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]).row(_name(file)) for file in files]


def _name(file: Path) -> str:
    return f"{file.parent.name}/{file.name.removesuffix('.json.gz')}"


def timeline(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Return what ran on the device of a trace of torch's profiler.

    Raises:
        NoKernelsError: Nothing ran on a GPU.
    """
    found = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not found:
        raise NoKernelsError("The trace has no kernels of a GPU. Trace on a machine with a GPU.")
    numbers = Counter(event["args"]["stream"] for event in found)
    ((main_stream, _),) = numbers.most_common(1)
    own = merged(_span(event) for event in found if event["args"]["stream"] == main_stream)
    return Timeline(
        busy=_length(own),
        gaps=tuple((before[1], after[0]) for before, after in pairwise(own)),
        others=tuple(merged(_span(event) for event in found if event["args"]["stream"] != main_stream)),
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the time that is in any of the spans, as ascending spans without overlaps."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def shared(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Return how long both run. Each is ascending, without overlaps."""
    total, at = 0.0, 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        index = at
        while index < len(others) and others[index][0] < end:
            total += min(end, others[index][1]) - max(start, others[index][0])
            index += 1
    return total


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


if __name__ == "__main__":
    main()
