"""Writing to the ring: extents for encoded rows, their chunk headers, and reports of lost rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.shipping.worker.producer import Filled
from residuum.v1 import capture_pb2, store_pb2
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.shipping.ring import Extent
    from inference_svc.shipping.worker.producer import RingProducer
    from inference_svc.taps.plan import Capture
    from residuum.v1 import tensor_pb2
    from residuum.wire.rows.encodings import RowFormat

_log = get_logger(__name__)

NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""What an encoding raises without memory. Only the rows that it encodes are lost."""

_POSITIONS_AT_ONCE = 1024
"""protobuf takes over this many positions in about 20 µs, and keeps all other threads from Python in that time."""


@dataclass(frozen=True)
class ModelRows:
    """The shape and type of rows as the model computes them."""

    hidden: int
    """Elements of a row."""
    dtype: tensor_pb2.DataType.ValueType


class Encoded(NamedTuple):
    """Encoded rows of a capture in an extent."""

    capture: Capture
    positions: Sequence[int]
    form: RowFormat
    """The format of the encoded rows."""
    extent: Extent


class RingWriter:
    """Acquires extents for rows, publishes them, and reports lost rows. The sink writes the bytes in between."""

    def __init__(self, producer: RingProducer, model_rows: ModelRows) -> None:
        """Write rows of one format to a producer's ring."""
        self._producer = producer
        self._format = model_rows

    def format_of(self, capture: Capture) -> RowFormat:
        """Return the format of a capture's encoded rows."""
        return capture.encoding.format_of(self._format.hidden, self._format.dtype)

    def acquire(
        self, capture: Capture, positions: Sequence[int], form: RowFormat, *, block: bool, at_once: bool = False
    ) -> Extent | None:
        """Return an extent that fits rows once they are encoded.

        Args:
            capture: The capture of the rows.
            positions: The positions of the rows.
            form: The format of the encoded rows.
            block: Wait while the ring is full. Otherwise return None.
            at_once: Without `block`, do not even wait for acknowledgements that have come.
        """
        nbytes = form.payload_bytes(capture.units, len(positions))
        return self._producer.acquire(nbytes, block, capture.capture_id, at_once=at_once)

    def publish(self, *encoded: Encoded) -> None:
        """Hand extents that hold encoded rows to shippers, with a chunk header for each site."""
        self._producer.publish_all(
            [
                Filled(extent, capture.capture_id, _headers(capture, positions, form), extent.nbytes)
                for capture, positions, form, extent in encoded
            ]
        )

    def give_up(self, encoded: Encoded, error: BaseException) -> None:
        """Release an extent whose rows could not be encoded, and report the rows as lost.

        Nothing may write to the extent any more.
        """
        capture = encoded.capture
        _log.error("rows cannot be encoded", capture_id=capture.capture_id, exc_info=error)
        self._producer.release(encoded.extent)
        self.report_loss(
            capture,
            encoded.positions,
            capture_pb2.INCOMPLETE_REASON_WRITE_FAILED,
            f"The worker could not encode these rows ({type(error).__name__}); its log says why.",
        )

    def shed(self, capture: Capture, positions: Sequence[int]) -> None:
        """Report rows as lost, because the ring is full and the capture's policy is SHED."""
        self.report_loss(
            capture,
            positions,
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
        by_layers: dict[tuple[int, ...], list[capture_pb2.Site.ValueType]] = {}
        for site, layers in capture.places:
            by_layers.setdefault(layers, []).append(site)
        for layers, sites in by_layers.items():
            loss = store_pb2.RowLoss(
                sequence=capture.sequence,
                sites=sites,
                layers=layers,
                positions=positions,
                reason=reason,
                detail=detail,
            )
            self._producer.report_loss(capture.capture_id, loss)


def _headers(capture: Capture, positions: Sequence[int], form: RowFormat) -> list[bytes]:
    """Return the chunk headers of encoded rows, one for each site, serialised.

    Serialised messages that follow each other are one message with the fields of all. What is the same in all headers
    of a capture is serialised only once.
    """
    header = capture_pb2.ChunkHeader(positions=positions[:_POSITIONS_AT_ONCE])
    for first in range(_POSITIONS_AT_ONCE, len(positions), _POSITIONS_AT_ONCE):
        header.positions.extend(positions[first : first + _POSITIONS_AT_ONCE])
    rest = _format_part(form) + header.SerializeToString()
    return [part + rest for part in capture.header_parts]


@lru_cache(maxsize=64)
def _format_part(form: RowFormat) -> bytes:
    """Return the part of chunk headers that the format decides, serialised."""
    return capture_pb2.ChunkHeader(
        dtype=form.dtype,
        width=form.width,
        encoding=form.encoding,
        dimensions=form.dimensions,
        axis=form.axis,
        features=form.features,
    ).SerializeToString()
