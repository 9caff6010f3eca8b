# ruff: noqa: ANN001, ANN202, N803 - a Triton kernel is written without annotations, its constants in capitals
"""One process of bench.host.copies; see `bench.child`."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from bench.host.copies import Run, Way
from bench.processes import RunFailedError, hand_over
from inference_svc.taps.gpu.host_copies import HostCopies
from inference_svc.taps.gpu.score_copies import HostPointer

_LAYERS, _ROWS, _HIDDEN, _INNER = 36, 32, 2048, 22016
_COPY_BYTES, _RING_BYTES = 64 << 20, 512 << 20
_COPIES = 32
_STEPS, _REPEATS, _EVERY = 40, 5, 8
_LEAD_SECONDS = 0.0003


def main() -> None:
    """Run the job in the first file, and write its measurements to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    way = Way(json.loads(job_file.read_text())["way"])
    if not torch.cuda.is_available():
        raise RunFailedError("There is no GPU.")
    hand_over(result_file, asdict(measure(way)))


def measure(way: Way) -> Run:
    """Measure a way."""
    step, copy = _step(), _Copier(way)
    before = _seconds(step)
    for number in range(_COPIES):
        copy(number)
    copy.finish()
    after = _seconds(step)
    during = _seconds(step, copy)
    return Run(way, torch.cuda.get_device_name(), before * 1e6, after * 1e6, during * 1e6, _wait(copy) * 1e6)


def _step() -> Callable[[], object]:
    """Return a function that replays a graph of the products of a model of the shape of Qwen2.5-3B."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    sizes = ((_HIDDEN, 2560), (_HIDDEN, _HIDDEN), (_HIDDEN, _INNER), (_INNER // 2, _HIDDEN))
    layers = [[torch.randn(*size, **options) * 0.02 for size in sizes] for _ in range(_LAYERS)]
    rows = torch.randn(_ROWS, _HIDDEN, **options)

    def run() -> torch.Tensor:
        hidden = rows
        for first, second, third, fourth in layers:
            hidden = (hidden + (hidden @ first)[:, :_HIDDEN].contiguous() @ second).mul(0.5)
            inner = hidden @ third
            hidden = hidden + (torch.nn.functional.silu(inner[:, : _INNER // 2]) * inner[:, _INNER // 2 :]) @ fourth
        return hidden

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> None:
        graph.replay()

    return replay


class _Copier:
    """Copies 64 MiB to a part of a pinned memory file, as large as a ring, on a stream and a thread of its own."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._stream = torch.cuda.Stream()
        self._copies = HostCopies()
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        self._source = torch.ones(1, _COPY_BYTES // 4, dtype=torch.int32, device="cuda")
        file = os.memfd_create("ring")
        os.ftruncate(file, _RING_BYTES)
        self._ring = np.frombuffer(mmap.mmap(file, _RING_BYTES), dtype=np.uint8)
        if code := int(torch.cuda.cudart().cudaHostRegister(self._ring.ctypes.data, _RING_BYTES, 0)):
            raise RunFailedError(f"The memory cannot be pinned: cudaHostRegister failed with {code}.")

    def __call__(self, number: int) -> None:
        """Start a copy, as the engine's thread hands blocks to the sink's."""
        self._last = self._thread.submit(self._copy, number)

    def finish(self) -> None:
        """Wait for all copies."""
        if self._last:
            self._last.result()
        self._stream.synchronize()

    def _copy(self, number: int) -> None:
        address = self._ring.ctypes.data + number * _COPY_BYTES % _RING_BYTES
        with torch.cuda.stream(self._stream):
            if self._way is Way.COPY_ENGINE:
                self._copies.copy(self._source, address)
            elif self._way is Way.KERNEL:
                target = HostPointer(address, torch.int32)
                _copy_kernel[(4,)](self._source, target, self._source.numel(), CHUNK=2048, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_kernel(source, target, count, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    for part in range(tl.program_id(0), tl.cdiv(count, CHUNK), tl.num_programs(0)):
        offsets = part * CHUNK + tl.arange(0, CHUNK)
        tl.store(target + offsets, tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


def _seconds(step: Callable[[], object], copy: _Copier | None = None) -> float:
    """Return the time of a step on the device, the median of several runs."""
    found: list[float] = []
    for repeat in range(_REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for number in range(_STEPS):
            step()
            if copy and number % _EVERY == 0:
                copy(number)
        end.record()
        torch.cuda.synchronize()
        if copy:
            copy.finish()
        if repeat:  # the first run warms up
            found.append(start.elapsed_time(end) / 1e3 / _STEPS)
    return statistics.median(found)


def _wait(copy: _Copier) -> float:
    """Return the time that a copy of 256 bytes takes soon after one of 64 MiB was started."""
    stream, tokens = torch.cuda.Stream(), torch.ones(32, dtype=torch.int64, device="cuda")
    target = torch.empty(32, dtype=torch.int64, pin_memory=True)
    found: list[float] = []
    for number in range(20):
        copy(number)
        time.sleep(_LEAD_SECONDS)
        start = time.perf_counter()
        with torch.cuda.stream(stream):
            target.copy_(tokens, non_blocking=True)
        stream.synchronize()
        found.append(time.perf_counter() - start)
        copy.finish()
    return statistics.median(found)


if __name__ == "__main__":
    main()
