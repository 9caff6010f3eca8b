"""Runs the taps of a worker for batches in which every request generates a token in each step.

The taps' code, the tap, the pool and the tables are real. Only the sink is replaced, and the rest of a worker is left
out. If the constructors of the taps change, update this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from inference_svc.taps.bank import VectorBank
from inference_svc.taps.blocks import Block, BlockPool
from inference_svc.taps.gpu import tap as gpu_tap
from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.layout import StepLayout, StepRows
from inference_svc.taps.steps.runtime import TapRuntime
from residuum.v1 import selection_pb2

PROMPT_TOKENS = 3
_HIDDEN = 8
"""The width of rows. The host never reads rows, so the width does not affect its cost and may be small."""
_EVERYWHERE = selection_pb2.PositionSelection()
_REPLY = selection_pb2.PositionSelection(ranges=[selection_pb2.PositionRange(first=-1)])


class Captures(str, Enum):
    """The positions that are captured, at every layer."""

    NONE = "none"
    ALL = "all"
    REPLY = "reply"
    """The last token of the prompt, and the generated tokens."""


class Device(str, Enum):
    """The tap that the layout of a step is passed to."""

    NONE = "none"
    """No tap: only the runtime and the planner run."""
    HOST = "host"
    """The GPU's tap with its tables in host memory and without CUDA calls. Needs no GPU."""
    CUDA = "cuda"
    """The GPU's tap as in production."""


class Steering(str, Enum):
    """How requests are steered, always after every layer."""

    NONE = "none"
    SHARED = "shared"
    """All requests have the same vector."""
    REQUEST = "request"
    """Each request has its own vector."""


class DecodeLoop:
    """Batches of requests that take turns. In the step of its batch, each request generates a token."""

    def __init__(
        self,
        requests: int,
        layers: int,
        *,
        device: Device = Device.HOST,
        captures: Captures = Captures.ALL,
        steering: Steering = Steering.NONE,
        batches: int = 1,
    ) -> None:
        """Admit the requests, and compute their prompts.

        Args:
            requests: The number of requests.
            layers: Layers of the model; all are captured or steered.
            device: The tap that the layout of a step is passed to.
            captures: The positions that are captured.
            steering: How they are steered.
            batches: How many batches the requests are divided into.
        """
        where = torch.device("cuda" if device is Device.CUDA else "cpu")
        self._points = TapPoints(0, layers)
        rows = BlockPool.rows_needed(PROMPT_TOKENS * requests, requests + 1, layers)
        self._pool = BlockPool(rows, _HIDDEN, torch.bfloat16, where, largest_block=0)
        self._bank = VectorBank(max(requests, 1), _HIDDEN, where)
        self.sink = Sink(self._pool)
        tap = self._make_tap(device, requests)
        self.runtime = TapRuntime(self._points, tap, self._pool, self.sink)  # type: ignore[arg-type]
        self._names = [f"request-{index}" for index in range(requests)]
        self._batches = batches
        self._step = 0
        self._compute_prompts([_plan(index, layers, captures=captures, steering=steering) for index in range(requests)])

    def step(self) -> None:
        """Compute a token of each request of one batch."""
        self.begin()
        self.place_and_finish()

    def begin(self) -> None:
        """Begin a step."""
        self.runtime.begin_step((), ())

    def place_and_finish(self) -> None:
        """Run the taps' work before and after the forward pass."""
        self.runtime.place(self._tell_rows)
        self.runtime.finish_step()
        self._step += 1

    def _tell_rows(self) -> StepRows:
        """Return the rows of the step like the adapters of the model runners: two of the three lists are from numpy."""
        turns, batch = divmod(self._step, self._batches)
        names = self._names[batch :: self._batches]
        firsts = np.full(len(names), PROMPT_TOKENS + turns, dtype=np.int64)
        return StepRows(names, firsts.tolist(), np.ones(len(names), dtype=np.int64).tolist())

    def _compute_prompts(self, plans: Sequence[RequestPlan]) -> None:
        self.runtime.begin_step((), zip(self._names, plans, strict=True))
        count = len(self._names)
        self.runtime.place(lambda: StepRows(self._names, [0] * count, [PROMPT_TOKENS] * count))
        self.runtime.finish_step()

    def _make_tap(self, device: Device, requests: int) -> Any:
        if device is Device.NONE:
            return _NoTap()
        most_rows = max(requests, 1) * PROMPT_TOKENS
        arguments = (self._bank, self._pool, self._points, most_rows, max(requests, 1))
        if device is Device.CUDA:
            return gpu_tap.CudaTap(*arguments)
        with mock.patch.object(gpu_tap, "torch", TorchWithoutCuda()):
            return gpu_tap.CudaTap(*arguments)


class Sink:
    """Replaces the sink. It frees blocks immediately; the thread of the GPU's sink does so a little later."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.sent = 0
        """The number of blocks sent."""

    def send(self, blocks: Sequence[Block]) -> None:
        """See `BlockSink.send`."""
        self.sent += len(blocks)
        for block in blocks:
            self._pool.give_back(block)

    def publish(self, *, may_be_last: bool) -> None:
        """See `BlockSink.publish`."""

    def hurry(self) -> None:
        """See `BlockSink.hurry`."""

    def lose(self, *arguments: object) -> None:
        """See `BlockSink.lose`."""
        raise AssertionError(f"rows were lost: {arguments}")


class _NoTap:
    def arm(self, layout: StepLayout) -> None:
        del layout

    def disarm(self) -> None:
        pass


class _NoEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class TorchWithoutCuda:
    """torch with replacements for the CUDA features that the GPU's tap needs: pinned memory and events."""

    cuda = SimpleNamespace(Event=_NoEvent)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        """Return memory that is not pinned."""
        del pin_memory
        return torch.empty(*size, **options)


def _plan(index: int, layers: int, *, captures: Captures, steering: Steering) -> RequestPlan:
    everywhere = tuple(range(layers))
    positions = _REPLY if captures is Captures.REPLY else _EVERYWHERE
    vector = index if steering is Steering.REQUEST else 0
    return RequestPlan(
        prompt_tokens=PROMPT_TOKENS,
        capture=None if captures is Captures.NONE else Capture(f"capture-{index}", 0, everywhere, positions),
        operations=(Operation(Kind.ADD, vector, everywhere, _EVERYWHERE),) if steering is not Steering.NONE else (),
    )
