"""Turns a checked spec into the plan that the worker reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from inference_svc.admission.gates import gate_digests, make_gate
from inference_svc.admission.probes import columns_of, products_of
from inference_svc.admission.rules import ABORT, has_action
from inference_svc.admission.steering import layer_digests
from inference_svc.resources.sae_memory import sae_name
from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan, RowEncoding, SharedPlan
from residuum.v1 import capture_pb2, probe_pb2, selection_pb2, steering_pb2
from residuum.wire.limits import BLOCK_TOKENS
from residuum.wire.selection import layers_by_site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.admission.specs import SharedSpec
    from inference_svc.requests.registry import Running
    from inference_svc.taps.plan import Gate, ScoreRegion
    from residuum.v1 import inference_pb2

_KINDS = {
    "add": Kind.ADD,
    "ablate": Kind.ABLATE,
    "cap": Kind.CAP,
    "replace": Kind.CAP,
    "set": Kind.SET,
    "multiply": Kind.MULTIPLY,
    "clamp_feature": Kind.CLAMP,
}

_SPARE_POSITIONS = 7
"""How many positions the engine may compute beyond the end of a sequence, if the engine itself detects the end. It
schedules one step ahead for each pipeline stage, and each step computes one position."""

_SPARE_POSITIONS_OF_TEXTS = 31
"""The same for a request with stop strings, or with rules that end it. Another process detects the end, and the engine
computes on meanwhile."""


def make_plan(
    running: Running,
    sequence: int,
    prompt_tokens: int,
    rows: dict[bytes, int],
    spare_positions: int = 0,
    scores: ScoreRegion | None = None,
) -> RequestPlan | None:
    """Return the plan of one sequence of a request; None if the request neither captures, steers nor scores.

    Args:
        running: The request.
        sequence: The index of the sequence.
        prompt_tokens: The number of tokens in its prompt.
        rows: The row of each vector in the bank, by digest.
        spare_positions: How many positions the engine may compute beyond the end of the sequence.
        scores: Where the scores of its probes go.
    """
    spec = running.spec
    if spec.capture is None and spec.steering is None and spec.probes is None:
        return None
    if spec.capture is None or spec.capture.reduction <= capture_pb2.REDUCTION_NONE:
        spare_positions = 0  # nothing needs them, and plans that differ only in them would not be shared
    key = (SharedPlan, running.tenant, tuple(rows.items()), spare_positions)
    shared = spec.shared.derived(key, lambda: _shared(spec.shared, running.tenant, rows, spare_positions))
    name = engine_id(running.path, sequence) if spec.shared.may_change_steering else ""
    return RequestPlan.of(shared, prompt_tokens, running.path, sequence, name, scores)


def _shared(spec: SharedSpec, tenant: str, rows: dict[bytes, int], spare_positions: int) -> SharedPlan:
    """Return what the plans of requests with a shared spec have in common."""
    return SharedPlan(
        _capture(spec.capture, tenant, rows, spare_positions) if spec.capture else None,
        (make_operations(spec.steering, rows) if spec.steering else ()) + _scoring(spec.probes, rows),
    )


def count_spare_positions(sampling: inference_pb2.SamplingParameters, probes: probe_pb2.ProbeSpec | None = None) -> int:
    """Return how many positions the engine may compute beyond the end of a sequence."""
    ends_here = sampling.stop or has_action(probes, ABORT)
    return _SPARE_POSITIONS_OF_TEXTS if ends_here else _SPARE_POSITIONS


def engine_id(path: str, sequence: int) -> str:
    """Return the ID that the engine uses for a sequence of a request."""
    return f"{path}#{sequence}"


def make_operations(steering: steering_pb2.SteeringSpec, rows: dict[bytes, int]) -> tuple[Operation, ...]:
    """Return the operations of a checked steering spec in the worker's form.

    Args:
        steering: The checked spec.
        rows: The row of each vector in the bank, by digest.
    """
    operations: list[Operation] = []
    for item in steering.operations:
        layers, digests = tuple(item.layers.list.layers), layer_digests(item)
        of_gate: Sequence[bytes | None] = gate_digests(item) or [None]
        groups = [(layer,) for layer in layers] if len(digests) > 1 or len(of_gate) > 1 else [layers]
        # One digest serves all layers.
        for index, group in enumerate(groups):
            digest, gate_digest = digests[index % len(digests)], of_gate[index % len(of_gate)]
            gate = make_gate(item, rows[gate_digest]) if gate_digest else None
            operations.append(_operation(item, group, rows[digest], gate))
    return tuple(operations)


def _scoring(spec: probe_pb2.ProbeSpec | None, rows: dict[bytes, int]) -> tuple[Operation, ...]:
    """Return the operations that compute the scores of checked probes."""
    return tuple(
        Operation(
            Kind.SCORE,
            rows[product.digest],
            (product.layer,),
            selection_pb2.PositionSelection(),
            site=product.site,
            column=column,
        )
        for probe, columns in (zip(spec.probes, columns_of(spec), strict=True) if spec else ())
        for product, column in zip(products_of(probe), columns, strict=True)
    )


def _capture(spec: capture_pb2.CaptureSpec, tenant: str, rows: dict[bytes, int], spare_positions: int) -> Capture:
    """Return a capture in the worker's form, without an ID."""
    options = spec.encoding_options
    places = sorted(layers_by_site(spec).items())
    return Capture(
        capture_id="",
        sequence=0,
        layers=tuple(spec.layers.list.layers),
        positions=spec.positions,
        sites=tuple(site for site, _ in places),
        sheds=spec.overflow == capture_pb2.OVERFLOW_POLICY_SHED,
        before_steering=spec.before_steering,
        encoding=RowEncoding(
            spec.encoding or capture_pb2.ENCODING_RAW,
            options.dimensions or len(options.vectors),
            options.seed,
            options.axis,
            tuple(rows[digest] for digest in options.vectors),
            sae_name(tenant, options.sae.digest) if options.HasField("sae") else "",
            options.sae.features,
            tuple(options.sae.chosen),
        ),
        reduction=spec.reduction or capture_pb2.REDUCTION_NONE,
        flush_interval=spec.flush_interval or BLOCK_TOKENS,
        spare_positions=spare_positions,
        site_layers=tuple(layers for _, layers in places) if spec.site_layers else (),
    )


def _operation(item: steering_pb2.SteeringOperation, layers: tuple[int, ...], row: int, gate: Gate | None) -> Operation:
    name = item.WhichOneof("operation")
    assert name is not None  # noqa: S101 - SpecResolver refuses an operation without a kind
    scale, low, high = 1.0, -math.inf, math.inf
    if name == "add":
        scale = item.add.scale
    elif name == "ablate":
        scale = item.ablate.scale if item.ablate.HasField("scale") else 1.0
    elif name == "replace":
        low = high = item.replace.value
    elif name in ("cap", "clamp_feature"):
        bounds = item.cap if name == "cap" else item.clamp_feature
        low = bounds.min if bounds.HasField("min") else -math.inf
        high = bounds.max if bounds.HasField("max") else math.inf
    site = item.site or capture_pb2.SITE_RESID_POST
    return Operation(_KINDS[name], row, layers, item.positions, scale, low, high, item.keep_norm, site, gate)
