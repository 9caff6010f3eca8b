"""The taps as they serve, armed with a batch: plans go in where the worker takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.steering.ways import CAP_HIGH, CAP_LOW, SCALES
from inference_svc.taps.bank import VectorBank
from inference_svc.taps.gpu.tap import CudaTap
from inference_svc.taps.plan import Kind, Operation, RequestPlan
from inference_svc.taps.points import TapPoints
from inference_svc.taps.steps.layout import StepRows
from inference_svc.taps.steps.runtime import TapRuntime
from residuum.v1 import selection_pb2

if TYPE_CHECKING:
    from bench.steering.ways import Batch

LAYERS = 28
_EVERYWHERE = selection_pb2.PositionSelection()


class ArmedTap:
    """A worker's tap in the step in which a batch's prompts are computed, all of them steered after every layer."""

    def __init__(self, batch: Batch) -> None:
        """Load the bank, admit the requests, place their rows."""
        rows = batch.requests * batch.rows_each
        points = TapPoints(0, LAYERS)
        bank = VectorBank(batch.unique, batch.vectors.shape[1], batch.vectors.device)
        bank.load([(row, vector.cpu().numpy().astype("<f4").tobytes()) for row, vector in enumerate(batch.vectors)])
        self.tap = CudaTap(bank, None, points, rows, batch.requests)
        runtime = TapRuntime(points, self.tap, None, None)
        names = [f"request-{index}" for index in range(batch.requests)]
        runtime.begin_step((), [(name, plan_of(batch, index).to_extra_args()) for index, name in enumerate(names)])
        runtime.place(lambda: StepRows(names, [0] * batch.requests, [batch.rows_each] * batch.requests))
        self._points = [points.after(layer) for layer in range(LAYERS)]

    def point(self, number: int) -> int:
        """Return the tap point of one layer after the other."""
        return self._points[number % LAYERS]


def plan_of(batch: Batch, index: int) -> RequestPlan:
    """Return the plan of a request of a batch."""
    low, high = (CAP_LOW, CAP_HIGH) if batch.kind is Kind.CAP else (float("-inf"), float("inf"))
    return RequestPlan(
        prompt_tokens=batch.rows_each,
        operations=(
            Operation(
                batch.kind, index % batch.unique, tuple(range(LAYERS)), _EVERYWHERE, SCALES[batch.kind], low, high
            ),
        ),
    )
