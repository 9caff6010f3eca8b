"""Decides what happens if a new capture has the ID of an existing one."""

from __future__ import annotations

from residuum.v1 import capture_pb2
from residuum.wire.labels import changed, to_dict, write_value
from store_svc.captures.capture_names import capture_exists
from store_svc.captures.leases import Leases
from store_svc.captures.lifecycle import COMPLETE, OPEN

_NOT_COMPARED = ("layout", "vllm_version", "request_time", "attempt", "service_instance")
"""Fields that may differ between two descriptions of the same request."""

_SHOWN = 200
"""The characters of labels that a message shows."""

_NAMES = {
    "spec": "capture spec",
    "probes": "set of probes and rules",
    "adapter": "LoRA adapter",
    "prompt_token_ids": "prompt",
    "prompt_text": "prompt",
    "num_sequences": "number of sequences",
    "sampling_digest": "sampling",
}
"""The names of fields in messages, where they differ from the names in the contract."""


def is_replaced(
    existing: capture_pb2.CaptureManifest,
    new: capture_pb2.CaptureDescription,
    if_exists: capture_pb2.IfExists.ValueType,
    leases: Leases,
    *,
    is_sealed: bool,
) -> bool:
    """Return whether a new capture replaces an existing one. If not, the existing one is the result.

    Args:
        existing: The manifest, or the record, of the existing capture.
        new: The description of the new one.
        if_exists: What its caller asks for.
        leases: Which inference services live.
        is_sealed: Whether the existing capture is sealed: its request has ended.

    Raises:
        Failure: CAPTURE_EXISTS: `if_exists` is FAIL, the existing capture is of another request, or its request may
            still be running.
    """
    if if_exists not in (capture_pb2.IF_EXISTS_REPLACE, capture_pb2.IF_EXISTS_SKIP):
        raise capture_exists(new.capture_id, existing.state)
    if if_exists == capture_pb2.IF_EXISTS_SKIP:
        different = _difference(existing.description, new)
        if different:
            raise capture_exists(
                new.capture_id,
                existing.state,
                f"It is of another request: its {different}. Set if_exists to REPLACE to replace it, or choose "
                "another ID.",
            )
    if existing.state == OPEN and not is_sealed:
        _check_not_running(existing.description, new, leases)
    return if_exists == capture_pb2.IF_EXISTS_REPLACE or existing.state != COMPLETE


def _difference(existing: capture_pb2.CaptureDescription, new: capture_pb2.CaptureDescription) -> str:
    """Return how the two requests differ, by the first field that does; empty if they are the same.

    Labels count only as the requests ask for them, in any order; later changes of labels do not count. The flush
    interval does not count either, because the rows are the same.
    """
    existing, before = _comparable(existing)
    new, after = _comparable(new)
    if before != after:
        return f"set of labels differs (it was {_labels(before)}, now {_labels(after)})"
    for field in capture_pb2.CaptureDescription.DESCRIPTOR.fields:
        if field.name in _NOT_COMPARED:
            continue
        before, after = getattr(existing, field.name), getattr(new, field.name)
        if field.name == "sampling_digest" and not (before and after):
            continue  # a writer that is older than this field
        if before != after:
            shown = ["none" if value == "" else value for value in (before, after)]
            values = " (it was {}, now {})".format(*shown) if isinstance(before, int | str) else ""
            hidden = field.name in ("prompt_text", "sampling_digest")
            return f"{_NAMES.get(field.name, str(field.name))} differs{'' if hidden else values}"
    return ""


def _labels(labels: list[capture_pb2.Label]) -> str:
    """Return labels for a message; a long text is truncated."""
    text = ", ".join(f"{name} = {write_value(value)}" for name, value in to_dict(labels).items()) or "none"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _comparable(
    description: capture_pb2.CaptureDescription,
) -> tuple[capture_pb2.CaptureDescription, list[capture_pb2.Label]]:
    """Return a description without the labels and the flush interval, and the labels by name."""
    rest = capture_pb2.CaptureDescription()
    rest.CopyFrom(description)
    rest.spec.ClearField("labels")
    rest.spec.ClearField("flush_interval")
    return rest, changed([], description.spec.labels, [])


def _check_not_running(
    existing: capture_pb2.CaptureDescription, new: capture_pb2.CaptureDescription, leases: Leases
) -> None:
    """Check that the request of an open capture is no longer running.

    A service that opens a capture again has already ended the earlier request. For another service, its lease decides.
    """
    service = existing.service_instance
    if service == new.service_instance and service:
        return
    if not service:
        raise capture_exists(
            new.capture_id,
            OPEN,
            "Its request may still be running: its inference service is an older version, which renews no lease. "
            "If it is not running, delete the capture first (residuum rm).",
        )
    if leases.is_held(service, existing.tenant):
        raise capture_exists(
            new.capture_id,
            OPEN,
            f"Its request is still running, in another inference service, or was until a moment ago. Try again in "
            f"{leases.seconds:g} s, or abort that request.",
        )
