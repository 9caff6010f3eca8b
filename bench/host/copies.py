"""`python -m bench.host.copies`: what copies of rows to the host do to the model's kernels. It needs a GPU.

A CUDA graph of matrix products stands for a step of the model. It is timed before and after copies that run while the
device is otherwise idle, and while copies run beside it. Each way to copy runs in a fresh process: its effect on later
kernels may last until another process uses the device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from bench.machine import describe
from bench.options import add_output, positive
from bench.output import percent, table, write_result
from bench.plain import restore
from bench.processes import measuring, run_child


class Way(str, Enum):
    """A way to copy rows to the host."""

    NONE = "none"
    """No copies: the benchmark's own error."""
    COPY_ENGINE = "copy engine"
    """The sink's own (`host_copies`)."""
    KERNEL = "kernel"
    """A kernel of four programs on a second stream."""


@dataclass(frozen=True)
class Run:
    """The medians of one process, in microseconds."""

    way: Way
    device: str
    before_us: float
    """A step before any copy."""
    after_us: float
    """A step after 2 GiB were copied."""
    during_us: float
    """A step while 64 MiB are copied in every eighth one."""
    wait_us: float
    """A small copy on another stream, such as the model's copy of sampled tokens, while 64 MiB are copied."""


HEAD = ("copies by", "after them", "rounds", "during them", "rounds", "a small copy meanwhile takes, us")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.host.copies", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3, help="processes for each way")
    add_output(parser)
    options = parser.parse_args(arguments)
    with measuring(), tempfile.TemporaryDirectory(prefix="residuum-") as folder:
        runs = [
            restore(Run, run_child("bench.host.copies_child", {"way": way.value}, Path(folder), os.environ, way.value))
            for _ in range(options.rounds)
            for way in Way
        ]
    print(table(HEAD, rows(runs)))
    if options.output:
        found = {"benchmark": "bench.host.copies", **describe(), "runs": [asdict(run) for run in runs]}
        write_result(options.output, found)


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return the rows of the printed table: steps compared with those before the copies in the same process."""
    found: list[tuple[str, ...]] = []
    for way in Way:
        own = [run for run in runs if run.way is way]
        after = [run.after_us / run.before_us for run in own]
        during = [run.during_us / run.before_us for run in own]
        wait = statistics.median(run.wait_us for run in own)
        found.append((way.value, *_spread(after), *_spread(during), f"{wait:.0f}"))
    return found


def _spread(ratios: Sequence[float]) -> tuple[str, str]:
    return percent(statistics.median(ratios)), ", ".join(percent(ratio) for ratio in ratios)


if __name__ == "__main__":
    main()
