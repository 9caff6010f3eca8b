"""Writing to the ring: extents for encoded rows, their chunk headers, and reports of lost rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from residuum.v1 import capture_pb2, store_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.shipping.ring import Extent
    from inference_svc.shipping.worker.producer import RingProducer
    from inference_svc.taps.plan import Capture
    from inference_svc.taps.reductions import Batch
    from residuum.v1 import tensor_pb2
    from residuum.wire.encodings import RowFormat

_POSITIONS_AT_ONCE = 1024
"""protobuf takes over this many positions in about 20 µs, and keeps all other threads from Python in that time."""


@dataclass(frozen=True)
class ModelRows:
    """The shape and type of rows as the model computes them."""

    hidden: int
    """Elements of a row."""
    dtype: tensor_pb2.DataType.ValueType


class RingWriter:
    """Acquires extents for batches, publishes them, and reports lost rows. The sink writes the bytes in between."""

    def __init__(self, producer: RingProducer, model_rows: ModelRows) -> None:
        """Write rows of one format to a producer's ring."""
        self._producer = producer
        self._format = model_rows

    def format_of(self, capture: Capture) -> RowFormat:
        """Return the format of a capture's encoded rows."""
        return capture.encoding.format_of(self._format.hidden, self._format.dtype)

    def acquire(self, batch: Batch, form: RowFormat, *, block: bool) -> Extent | None:
        """Return an extent that fits a batch once it is encoded.

        Args:
            batch: The rows.
            form: The format of its encoded rows.
            block: Wait while the ring is full. Otherwise return None at once.
        """
        nbytes = form.payload_bytes(batch.capture.units, len(batch.positions))
        return self._producer.acquire(nbytes, block, batch.capture.capture_id)

    def publish(self, batch: Batch, form: RowFormat, extent: Extent) -> None:
        """Hand an extent that holds a batch's encoded rows to a shipper, with a chunk header for each site."""
        capture = batch.capture
        header = capture_pb2.ChunkHeader(
            sequence=capture.sequence,
            site=capture.sites[0],
            layers=capture.layers,
            positions=batch.positions[:_POSITIONS_AT_ONCE],
            dtype=form.dtype,
            width=form.width,
            encoding=form.encoding,
            dimensions=form.dimensions,
            axis=form.axis,
        )
        for first in range(_POSITIONS_AT_ONCE, len(batch.positions), _POSITIONS_AT_ONCE):
            header.positions.extend(batch.positions[first : first + _POSITIONS_AT_ONCE])
        headers = [header]
        for site in capture.sites[1:]:
            other = capture_pb2.ChunkHeader()
            other.CopyFrom(header)  # twice as fast as to read the positions again
            other.site = site
            headers.append(other)
        self._producer.publish(extent, capture.capture_id, headers)

    def shed(self, batch: Batch) -> None:
        """Report a batch as lost, because the ring is full and the capture's policy is SHED."""
        self.report_loss(
            batch.capture,
            batch.positions,
            capture_pb2.INCOMPLETE_REASON_OVERFLOW,
            "The ring had no room for rows of this store, and the capture's policy is SHED.",
        )

    def report_loss(
        self,
        capture: Capture,
        positions: Sequence[int],
        reason: capture_pb2.IncompleteReason.ValueType,
        detail: str,
    ) -> None:
        """Tell the store which rows of a capture it will never get, and why."""
        loss = store_pb2.RowLoss(
            sequence=capture.sequence,
            sites=capture.sites,
            layers=capture.layers,
            positions=positions,
            reason=reason,
            detail=detail,
        )
        self._producer.report_loss(capture.capture_id, loss)
