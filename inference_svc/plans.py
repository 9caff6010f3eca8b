"""From a checked spec to the plan that the worker reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from inference_svc.specs import digest_of
from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from inference_svc.requests import Running
    from residuum.v1 import steering_pb2

_KINDS = {"add": Kind.ADD, "ablate": Kind.ABLATE, "cap": Kind.CAP}


def make_plan(running: Running, sequence: int, prompt_tokens: int, rows: dict[bytes, int]) -> RequestPlan | None:
    """Return the plan of one sequence of a request; None if there is nothing for the taps to do.

    Args:
        running: The request.
        sequence: Which of its sequences.
        prompt_tokens: Tokens of its prompt.
        rows: The bank's row of each vector, by digest.
    """
    spec = running.spec
    operations = spec.steering.operations if spec.steering else ()
    if spec.capture is None and not operations:
        return None
    capture = _capture(running.request_id, sequence, spec.capture) if spec.capture else None
    return RequestPlan(prompt_tokens, capture, tuple(_operation(item, rows) for item in operations))


def _capture(capture_id: str, sequence: int, spec: capture_pb2.CaptureSpec) -> Capture:
    return Capture(
        capture_id=capture_id,
        sequence=sequence,
        layers=tuple(spec.layers.list.layers),
        positions=spec.positions,
        sites=tuple(sorted(spec.sites)),
        sheds=spec.overflow == capture_pb2.OVERFLOW_POLICY_SHED,
        before_steering=spec.before_steering,
    )


def _operation(item: steering_pb2.SteeringOperation, rows: dict[bytes, int]) -> Operation:
    name = item.WhichOneof("operation")
    assert name is not None  # noqa: S101 - resolve_spec refuses an operation that names nothing
    scale, low, high = 1.0, -math.inf, math.inf
    if name == "add":
        scale = item.add.scale
    elif name == "ablate":
        scale = item.ablate.scale if item.ablate.HasField("scale") else 1.0
    else:
        low = item.cap.min if item.cap.HasField("min") else -math.inf
        high = item.cap.max if item.cap.HasField("max") else math.inf
    return Operation(
        kind=_KINDS[name],
        row=rows[digest_of(item)],
        layers=tuple(item.layers.list.layers),
        positions=item.positions,
        scale=scale,
        low=low,
        high=high,
    )
