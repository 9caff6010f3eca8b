"""From a checked spec to the plan that the worker reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from inference_svc.admission.steering import layer_digests
from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan, RowEncoding
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from inference_svc.requests.registry import Running
    from residuum.v1 import inference_pb2, steering_pb2

_KINDS = {"add": Kind.ADD, "ablate": Kind.ABLATE, "cap": Kind.CAP, "replace": Kind.CAP}

_SPARE_POSITIONS = 7
"""Positions that the engine may compute beyond an end that it finds itself: one for each step that it schedules ahead,
and it does so for each pipeline stage."""

_SPARE_POSITIONS_OF_TEXTS = 31
"""The same where a text ends the request: that is found by another process, while the engine goes on."""


def make_plan(
    running: Running, sequence: int, prompt_tokens: int, rows: dict[bytes, int], spare_positions: int = 0
) -> RequestPlan | None:
    """Return the plan of one sequence of a request; None if there is nothing for the taps to do.

    Args:
        running: The request.
        sequence: Which of its sequences.
        prompt_tokens: Tokens of its prompt.
        rows: The bank's row of each vector, by digest.
        spare_positions: How many positions the engine may compute beyond the sequence's end.
    """
    spec = running.spec
    if spec.capture is None and spec.steering is None:
        return None
    return RequestPlan(
        prompt_tokens,
        _capture(running.path, sequence, spec.capture, rows, spare_positions) if spec.capture else None,
        make_operations(spec.steering, rows) if spec.steering else (),
        engine_id(running.path, sequence) if spec.steering and spec.steering.updatable else "",
    )


def count_spare_positions(sampling: inference_pb2.SamplingParameters) -> int:
    """Return how many positions the engine may compute beyond the end of a sequence."""
    return _SPARE_POSITIONS_OF_TEXTS if sampling.stop else _SPARE_POSITIONS


def engine_id(path: str, sequence: int) -> str:
    """Return what a sequence of a request is called in the engine."""
    return f"{path}#{sequence}"


def make_operations(steering: steering_pb2.SteeringSpec, rows: dict[bytes, int]) -> tuple[Operation, ...]:
    """Return a checked steering as the worker reads it.

    Args:
        steering: The steering.
        rows: The bank's row of each vector, by digest.
    """
    operations: list[Operation] = []
    for item in steering.operations:
        layers, digests = tuple(item.layers.list.layers), layer_digests(item)
        if item.layer_digests:
            operations += [
                _operation(item, (layer,), rows[digest]) for layer, digest in zip(layers, digests, strict=True)
            ]
        else:
            operations.append(_operation(item, layers, rows[digests[0]]))
    return tuple(operations)


def _capture(
    capture_id: str, sequence: int, spec: capture_pb2.CaptureSpec, rows: dict[bytes, int], spare_positions: int
) -> Capture:
    options = spec.encoding_options
    return Capture(
        capture_id=capture_id,
        sequence=sequence,
        layers=tuple(spec.layers.list.layers),
        positions=spec.positions,
        sites=tuple(sorted(spec.sites)),
        sheds=spec.overflow == capture_pb2.OVERFLOW_POLICY_SHED,
        before_steering=spec.before_steering,
        encoding=RowEncoding(
            spec.encoding or capture_pb2.ENCODING_RAW,
            options.dimensions or len(options.vectors),
            options.seed,
            options.axis,
            tuple(rows[digest] for digest in options.vectors),
        ),
        reduction=spec.reduction or capture_pb2.REDUCTION_NONE,
        spare_positions=spare_positions if spec.reduction > capture_pb2.REDUCTION_NONE else 0,
    )


def _operation(item: steering_pb2.SteeringOperation, layers: tuple[int, ...], row: int) -> Operation:
    name = item.WhichOneof("operation")
    assert name is not None  # noqa: S101 - resolve_spec refuses an operation that names nothing
    scale, low, high = 1.0, -math.inf, math.inf
    if name == "add":
        scale = item.add.scale
    elif name == "ablate":
        scale = item.ablate.scale if item.ablate.HasField("scale") else 1.0
    elif name == "replace":
        low = high = item.replace.value
    else:
        low = item.cap.min if item.cap.HasField("min") else -math.inf
        high = item.cap.max if item.cap.HasField("max") else math.inf
    return Operation(_KINDS[name], row, layers, item.positions, scale, low, high, item.keep_norm)
