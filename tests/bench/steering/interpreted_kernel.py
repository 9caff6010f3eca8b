"""Runs the kernel part of the steering benchmark on the CPU, in Triton's interpreter, with a fake clock.

It is a separate program, because Triton decides on import whether it interprets kernels. It prints the measurements as
JSON.
"""

from __future__ import annotations

import tests.triton_interpreter  # noqa: F401

# isort: split

import json
import sys
from dataclasses import asdict
from unittest import mock

import torch

from bench.host.loop import TorchWithoutCuda
from bench.steering import timing, ways
from bench.steering.kernel import Bench, KernelJob
from inference_svc.taps.gpu import tap

JOB = KernelJob(hidden=(48,), unique=(1, 4), requests=4, rows_each=3, compile_seconds=0.0)


def main() -> None:
    torch.manual_seed(0)
    ways.ROUNDING *= 2  # the interpreter truncates to bfloat16 instead of rounding
    times = timing.Times((3.0, 1.0, 2.0))

    def in_graph(launch, launches, *, keep):
        for number in range(2):
            launch(number)
        return times

    def launched(launch):
        launch(0)
        return times

    with (
        mock.patch.object(tap, "torch", TorchWithoutCuda()),
        mock.patch.object(timing, "in_graph", in_graph),
        mock.patch.object(timing, "launched", launched),
    ):
        bench = Bench(JOB, torch.device("cpu"), l2_bytes=1000)
        bench.measure_all()
    json.dump([asdict(item) for item in bench.measurements], sys.stdout)


if __name__ == "__main__":
    main()
