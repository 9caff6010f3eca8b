"""What a shipper sends: the pieces of a slot, or the news of a loss, each one message of AppendChunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inference_svc.shipping.framing import Piece, append_message, cut
from residuum.v1 import capture_pb2, store_pb2


class Delivery:
    """What one ticket names, until the store has acknowledged every parcel of it.

    Until `on_done` is called, a slot's bytes are the shipper's: whatever happens to a stream, they can be sent again
    from where they lie, so nothing is ever copied aside.
    """

    def __init__(self, num_parcels: int, on_done: Callable[[], None]) -> None:
        """Expect that many parcels."""
        self._remaining = num_parcels
        self._on_done = on_done

    def finish_one(self) -> None:
        """Count one parcel as settled. Only one thread may call it."""
        self._remaining -= 1
        if self._remaining == 0:
            self._on_done()


@dataclass(slots=True)
class Parcel:
    """One message that is to be sent, and sent again, until the store acknowledges it."""

    capture_id: str
    content: Piece | store_pb2.RowLoss
    delivery: Delivery
    resent: bool = False
    """The store found its checksum wrong once."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload; of a loss, none to speak of."""
        return len(self.content.payload) if isinstance(self.content, Piece) else 0

    def encode(self, number: int) -> bytes:
        """Return the bytes of the AppendChunksRequest of that number."""
        if isinstance(self.content, Piece):
            return append_message(number, self.capture_id, self.content)
        message = store_pb2.AppendChunksRequest(number=number, capture_id=self.capture_id, loss=self.content)
        return message.SerializeToString()

    def as_loss(self, detail: str) -> Parcel | None:
        """Return the news that these rows cannot be written, which takes this parcel's place; None if it is that news.

        The delivery stays unfinished until the news itself is acknowledged: no row disappears without a word.
        """
        if not isinstance(self.content, Piece):
            return None
        return Parcel(self.capture_id, write_failed(self.content.header, detail), self.delivery)


def slot_parcels(
    capture_id: str, header: capture_pb2.ChunkHeader, slot: memoryview, on_done: Callable[[], None]
) -> list[Parcel]:
    """Return the parcels of a slot whose first bytes the header describes; `on_done` follows the last one's settling.

    Rows that no chunk can hold become the news of their loss.
    """
    try:
        contents: list[Piece] = list(cut(header, slot))
    except ValueError as error:
        return loss_parcels(capture_id, write_failed(header, str(error)), on_done)
    delivery = Delivery(len(contents), on_done)
    return [Parcel(capture_id, content, delivery) for content in contents]


def loss_parcels(capture_id: str, loss: store_pb2.RowLoss, on_done: Callable[[], None]) -> list[Parcel]:
    """Return the one parcel of a loss."""
    return [Parcel(capture_id, loss, Delivery(1, on_done))]


def write_failed(header: capture_pb2.ChunkHeader, detail: str) -> store_pb2.RowLoss:
    """Return the loss of all the rows that a header names."""
    return store_pb2.RowLoss(
        sequence=header.sequence,
        sites=[header.site],
        layers=header.layers,
        positions=header.positions,
        reason=capture_pb2.INCOMPLETE_REASON_WRITE_FAILED,
        detail=detail,
    )
