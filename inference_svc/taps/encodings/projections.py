"""What the service and its workers agree on about random projections. It needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from residuum.v1 import capture_pb2

KEPT_BYTES = 256 << 20
"""Limit for the matrices that the service tells a worker to keep. A single matrix may be larger."""


class Projection(NamedTuple):
    """The parameters of a random projection that its signs depend on."""

    seed: int
    dimensions: int
    computed: bool
    """Whether the projected rows are computed by a reduction, in float32; see `is_computed`."""


def is_computed(reduction: capture_pb2.Reduction.ValueType) -> bool:
    """Return whether a reduction computes new rows, in float32, instead of choosing among the captured rows."""
    return reduction in (capture_pb2.REDUCTION_MEAN, capture_pb2.REDUCTION_MAX, capture_pb2.REDUCTION_SUM)
