"""A batch in which requests come and go, with the worker's real threads: the GPU's sink, its ring and its dispatcher.

With CUDA everything is as in the worker, except that the model's time is a sleep. Without CUDA, a clock replaces the
device: a copy is done when the model's step is, plus the time of its bytes over PCIe. Narrow rows are copied in host
memory: the host never looks at rows, so their width does not change what the threads do.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.host.loop import Device, Sink, TorchWithoutCuda
from bench.processes import Helper
from inference_svc.shipping.worker.producer import RingProducer
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import BlockPool
from inference_svc.taps.gpu import copy_check, direct_copies, driver, host_copies, streamed_sink
from inference_svc.taps.gpu import tap as gpu_tap
from inference_svc.taps.plan import Capture, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.ring_writer import ModelRows
from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.steps.runtime import TapRuntime
from residuum.v1 import capture_pb2, selection_pb2, tensor_pb2

WIDTH = 2560
"""Elements of a row of the model that is imitated, in bfloat16."""
_NARROW = 8
"""Elements of a row without CUDA. The ring and the pool are smaller accordingly."""
_ROW_BYTES = 2 * WIDTH
_PCIE_BYTES_PER_SECOND = 25e9
_LARGEST_BLOCK_ROWS = (128 << 20) // _ROW_BYTES
_RING_ROWS = (1 << 30) // _ROW_BYTES
_CONNECT_SECONDS = 30.0
_DRAIN_SECONDS = 60.0
_SITES = (
    capture_pb2.SITE_RESID_POST,
    capture_pb2.SITE_RESID_PRE,
    capture_pb2.SITE_ATTN_OUT,
    capture_pb2.SITE_MLP_OUT,
)


@dataclass(frozen=True)
class Load:
    """What the engine computes. Every position of every layer is captured."""

    requests: int
    """Requests that run at once. When one ends, the next begins, so they are spread over their length."""
    prompt_tokens: int
    """Tokens of a prompt. It is computed in one step."""
    new_tokens: int
    """Tokens that a request generates."""
    layers: int
    """Layers of the model."""
    sites: int = 1
    """Sites that are captured in each layer, at most 4."""
    step_seconds: float = 0.01
    """Time of a step on the device."""


class Worker:
    """The parts of a worker that are beside the model: the pool, the ring with its dispatcher, and the sink.

    Example:
        with Worker.running(Load(64, 512, 128, 36), Device.HOST, folder) as worker:
            batch = Batch(worker, captures=True)
            batch.run_host_part()
    """

    def __init__(self, load: Load, device: Device, producer: RingProducer, clock: Clock) -> None:
        self.load = load
        self.clock = clock
        self.producer = producer
        self.device = torch.device("cuda" if device is Device.CUDA else "cpu")
        width = WIDTH if device is Device.CUDA else _NARROW
        self.points = TapPoints(0, load.layers)
        beginning = 1 + load.requests // (load.new_tokens + 1)  # most requests that begin in one step
        step_tokens = beginning * load.prompt_tokens + load.requests
        rows = BlockPool.rows_needed(step_tokens, load.requests + beginning, load.layers * load.sites, steps_leaving=1)
        self.pool = BlockPool(rows, width, torch.bfloat16, self.device, _LARGEST_BLOCK_ROWS)
        self.bank = VectorBank(1, width, self.device)
        self.sink = streamed_sink.StreamedSink(
            self.pool, ModelRows(width, tensor_pb2.DATA_TYPE_BFLOAT16), producer, self.bank
        )
        self.most_rows = step_tokens

    @classmethod
    @contextmanager
    def running(cls, load: Load, device: Device, folder: Path) -> Iterator[Worker]:
        """Run a worker whose rows are acknowledged by a process of their own. Without CUDA, replace it meanwhile."""
        control = folder / "ring.sock"
        width = WIDTH if device is Device.CUDA else _NARROW
        producer = RingProducer(control, ring_bytes=2 * width * _RING_ROWS)
        producer.start()
        acknowledger = Helper("bench.host.acknowledger", [str(control)])
        try:
            end = time.monotonic() + _CONNECT_SECONDS
            while not producer.stats().connected_shippers and time.monotonic() < end:
                time.sleep(0.01)
            clock = Clock()
            with contextlib.nullcontext() if device is Device.CUDA else _without_cuda(clock, producer):
                worker = cls(load, device, producer, clock)
                yield worker
                worker.drain()
        finally:
            acknowledger.stop()
            producer.close()

    def drain(self) -> None:
        """Wait until all rows are acknowledged."""
        if not (self.sink.flush(_DRAIN_SECONDS) and self.producer.drain(_DRAIN_SECONDS)):
            raise TimeoutError(f"rows were not acknowledged in {_DRAIN_SECONDS:.0f} s")


class Batch:
    """The requests of a worker's engine, and its steps."""

    def __init__(self, worker: Worker, *, ships: bool) -> None:
        """Start without requests.

        Args:
            worker: The worker.
            ships: Whether blocks go to the worker's sink. Otherwise they are given back at once, so the engine's thread
                does nearly the same work while all other threads are idle.
        """
        self._load, self._worker = worker.load, worker
        sink: Any = worker.sink if ships else Sink(worker.pool)
        tap = gpu_tap.CudaTap(worker.bank, worker.pool, worker.points, worker.most_rows, 2 * worker.load.requests)
        self.runtime = TapRuntime(worker.points, tap, worker.pool, sink)
        self._running: deque[tuple[str, int]] = deque()  # name, and the step in which its prompt was computed
        self._step = 0
        self._serial = 0
        self._due = 0.0  # how many requests should have begun

    def prepare(self) -> None:
        """Do the taps' work before the forward pass: requests that end and begin, and the step's rows."""
        load = self._load
        finished = []
        while self._running and self._step - self._running[0][1] > load.new_tokens:
            finished.append(self._running.popleft()[0])
        self._due += load.requests / (load.new_tokens + 1)
        admitted = []
        while self._due >= 1:
            self._due -= 1
            self._serial += 1
            name = f"request-{self._serial}"
            self._running.append((name, self._step))
            admitted.append((name, self._plan(name)))
        self.runtime.begin_step(finished, admitted)
        self.runtime.place(self._rows)

    def finish(self) -> None:
        """Do the taps' work after the forward pass was launched."""
        self.runtime.finish_step()
        self._step += 1

    def end(self) -> None:
        """End all requests."""
        self.runtime.begin_step([name for name, _ in self._running], ())
        self._running.clear()

    def _rows(self) -> StepRows:
        prompt, step = self._load.prompt_tokens, self._step
        return StepRows(
            [name for name, _ in self._running],
            [prompt + step - began - 1 if step > began else 0 for _, began in self._running],
            [1 if step > began else prompt for _, began in self._running],
        )

    def _plan(self, name: str) -> RequestPlan:
        load = self._load
        layers, positions = tuple(range(load.layers)), selection_pb2.PositionSelection()
        capture = Capture(name, 0, layers, positions, sites=tuple(sorted(_SITES[: load.sites])))
        return RequestPlan(prompt_tokens=load.prompt_tokens, capture=capture)


class Clock:
    """The device's time without CUDA. All times are those of `time.perf_counter`, in seconds."""

    def __init__(self) -> None:
        self.model = 0.0
        """When the model's stream has done the step that was launched last."""
        self.copies = 0.0
        """When the stream of the sink has done all its copies."""


def _copy_now(clock: Clock, producer: RingProducer, lines: host_copies.Lines, stream: int) -> None:
    """Copy lines on the host. Like the driver's call, this keeps the GIL; numpy would give it up."""
    del stream
    source = memoryview((ctypes.c_ubyte * (lines.pitch * lines.height)).from_address(lines.source)).cast("B")
    ring, start = producer.memory.data, lines.target - producer.memory.ctypes.data
    for line in range(lines.height):
        at, first = start + line * lines.width, line * lines.pitch
        ring[at : at + lines.width] = source[first : first + lines.width]
    seconds = lines.nbytes // (2 * _NARROW) * _ROW_BYTES / _PCIE_BYTES_PER_SECOND
    clock.copies = max(clock.copies, time.perf_counter()) + seconds


@contextmanager
def _without_cuda(clock: Clock, producer: RingProducer) -> Iterator[None]:
    """Replace the CUDA features that the tap and the sink need."""

    class Event:
        at = 0.0

        def __init__(self, *, blocking: bool = False) -> None: ...

        def record(self, stream: object = None) -> None:
            self.at = clock.model if (stream or current_stream()) is of_the_model else clock.copies

        def query(self) -> bool:
            return self.at <= time.perf_counter()

        def synchronize(self) -> None:
            time.sleep(max(self.at - time.perf_counter(), 0.0))

    class Stream:
        cuda_stream = 0

        def __init__(self, _device: object = None) -> None: ...

        def wait_stream(self, _stream: object) -> None:
            clock.copies = max(clock.copies, clock.model, time.perf_counter())

        def synchronize(self) -> None:
            time.sleep(max(clock.copies - time.perf_counter(), 0.0))

    of_the_model, local = Stream(), threading.local()

    def current_stream(_device: object = None) -> Stream:
        return getattr(local, "stream", of_the_model)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        local.stream = stream  # for the rest of the thread
        yield

    simulated = TorchWithoutCuda()
    simulated.cuda = mock.Mock(Event=Event, Stream=Stream, stream=on, current_stream=current_stream)
    simulated.cuda.cudart.return_value.cudaHostRegister.return_value = 0
    with (
        mock.patch.object(streamed_sink, "torch", simulated),
        mock.patch.object(streamed_sink, "TOGETHER_BYTES", streamed_sink.TOGETHER_BYTES * _NARROW // WIDTH),
        mock.patch.object(copy_check, "torch", simulated),
        mock.patch.object(direct_copies, "torch", simulated),
        mock.patch.multiple(driver, torch=simulated, _current_handle=None),
        mock.patch.object(gpu_tap, "torch", simulated),
        mock.patch.object(host_copies, "torch", simulated),
        mock.patch.object(host_copies, "queue_lines", partial(_copy_now, clock, producer)),
        mock.patch.object(host_copies, "PIECE_BYTES", host_copies.PIECE_BYTES * _NARROW // WIDTH),
    ):
        yield
