"""What a shipper sends: the pieces of an extent, or the news of a loss, each one message of AppendChunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from inference_svc.shipping.framing import Piece, append_message, cut, payload_bytes
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.tokens import split_path


class Delivery:
    """What one ticket names, until the store has acknowledged every parcel of it.

    Until `on_done` is called, an extent's bytes are the shipper's: whatever happens to a stream, they can be sent again
    from where they lie, so nothing is ever copied aside.

    It counts bytes, not parcels: parcels are made as they are sent, so their number is not known before.
    """

    def __init__(self, num_bytes: int, on_done: Callable[[], None]) -> None:
        """Expect parcels whose shares are that many bytes together."""
        self._remaining = num_bytes
        self._on_done = on_done

    def settle(self, share: int) -> None:
        """Count a parcel's share as settled. Only one thread may call it."""
        self._remaining -= share
        if self._remaining == 0:
            self._on_done()


@dataclass(slots=True)
class Parcel:
    """One message that is to be sent, and sent again, until the store acknowledges it."""

    capture_id: str
    content: Piece | store_pb2.RowLoss
    delivery: Delivery
    share: int
    """Bytes of the delivery that are settled with it; a loss that the worker reported is one."""
    resent: bool = False
    """The store found its checksum wrong once."""
    tenant: str = ""
    """Whose capture it is."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload; of a loss, none to speak of."""
        return len(self.content.payload) if isinstance(self.content, Piece) else 0

    def encode(self, number: int) -> bytes:
        """Return the bytes of the AppendChunksRequest of that number."""
        if isinstance(self.content, Piece):
            return append_message(number, self.capture_id, self.content, self.tenant)
        message = store_pb2.AppendChunksRequest(
            number=number, capture_id=self.capture_id, tenant=self.tenant, loss=self.content
        )
        return message.SerializeToString()

    def settle(self) -> None:
        """Count it as settled. Only one thread may call it."""
        self.delivery.settle(self.share)

    def as_loss(self, detail: str) -> Parcel | None:
        """Return the news that these rows cannot be written, which takes this parcel's place; None if it is that news.

        The delivery stays unfinished until the news itself is acknowledged: no row disappears without a word.
        """
        if not isinstance(self.content, Piece):
            return None
        loss = write_failed(self.content.header, detail)
        return Parcel(self.capture_id, loss, self.delivery, self.share, tenant=self.tenant)


def extent_parcels(
    path: str, headers: Sequence[capture_pb2.ChunkHeader], rows: memoryview, on_done: Callable[[], None]
) -> Iterator[Parcel]:
    """Yield the parcels of an extent, made one by one; `on_done` follows the last one's settling.

    Rows that no chunk can hold become the news of their loss.

    Args:
        path: The capture that the rows belong to, and its tenant; see `tenant_path`.
        headers: What the rows are; of known element types.
        rows: The payloads of the headers, one after the other, and nothing else.
        on_done: Called once every row is settled.
    """
    tenant, capture_id = split_path(path)
    delivery = Delivery(len(rows), on_done)
    end = 0
    for header in headers:
        start, end = end, end + payload_bytes(header)
        try:
            pieces = cut(header, rows[start:end])
        except ValueError as error:
            yield Parcel(capture_id, write_failed(header, str(error)), delivery, end - start, tenant=tenant)
        else:
            for piece in pieces:
                yield Parcel(capture_id, piece, delivery, len(piece.payload), tenant=tenant)


def loss_parcels(path: str, loss: store_pb2.RowLoss, on_done: Callable[[], None]) -> list[Parcel]:
    """Return the one parcel of a loss."""
    tenant, capture_id = split_path(path)
    return [Parcel(capture_id, loss, Delivery(1, on_done), share=1, tenant=tenant)]


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
