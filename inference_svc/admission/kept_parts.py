"""Keeps the resolved parts of specs, because callers repeat what they capture, steer and score."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from residuum.v1 import capture_pb2, probe_pb2, steering_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from residuum.v1 import inference_pb2

_MAX_KEPT_BYTES = 8 << 10
_KEPT = 64


class SpecParts(NamedTuple):
    """What a spec asks of the model, with every default filled in; None for what it does not ask for."""

    capture: capture_pb2.CaptureSpec | None
    steering: steering_pb2.SteeringSpec | None
    probes: probe_pb2.ProbeSpec | None


class KeptParts:
    """Resolves the parts of specs for one model, and keeps the results.

    It keeps them as bytes: every request gets messages of its own.
    """

    def __init__(self, resolve: Callable[[inference_pb2.RequestSpec], SpecParts]) -> None:
        """Keep nothing yet. `resolve` checks the parts of a spec, and depends on nothing else."""
        self._resolve = resolve
        self._kept: dict[tuple[bytes | None, ...], tuple[bytes | None, ...]] = {}

    def resolve(self, spec: inference_pb2.RequestSpec) -> SpecParts:
        """Return the resolved parts of a spec.

        Raises:
            Failure: The spec is invalid. The reason and the metadata name the field.
        """
        given = _bytes_of(
            spec.capture if spec.HasField("capture") else None,
            spec.steering if spec.HasField("steering") else None,
            spec.probes if spec.HasField("probes") else None,
        )
        known = self._kept.get(given)
        if known is not None:
            self._kept[given] = self._kept.pop(given)  # now the newest
            capture, steering, probes = known
            return SpecParts(
                None if capture is None else capture_pb2.CaptureSpec.FromString(capture),
                None if steering is None else steering_pb2.SteeringSpec.FromString(steering),
                None if probes is None else probe_pb2.ProbeSpec.FromString(probes),
            )
        parts = self._resolve(spec)
        if sum(len(data or b"") for data in given) <= _MAX_KEPT_BYTES:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]  # the oldest
            self._kept[given] = _bytes_of(*parts)
        return parts


def _bytes_of(
    capture: capture_pb2.CaptureSpec | None,
    steering: steering_pb2.SteeringSpec | None,
    probes: probe_pb2.ProbeSpec | None,
) -> tuple[bytes | None, ...]:
    return tuple(None if part is None else part.SerializeToString() for part in (capture, steering, probes))
