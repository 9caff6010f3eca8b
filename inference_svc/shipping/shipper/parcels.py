"""Parcels: the messages of AppendChunks. A parcel is a piece of an extent, or the report of a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from inference_svc.shipping.framing import Piece, append_message, cut, payload_bytes
from inference_svc.shipping.shipper.shared_rings import Place, SharedRings
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import TARGET_CHUNK_BYTES
from residuum.wire.rows import frames
from residuum.wire.rows.checksums import combined
from residuum.wire.tokens import split_path


class Delivery:
    """One item of a worker (an extent or a loss report), until the store has acknowledged all its parcels.

    The extent's bytes belong to the shipper until `on_done` is called. If a stream fails, it sends them again from the
    ring, so it never needs a copy.

    A delivery counts bytes, not parcels: parcels are made as they are sent, so their number is not known in advance.
    """

    def __init__(self, num_bytes: int, on_done: Callable[[], None]) -> None:
        """Expect parcels whose shares add up to `num_bytes`."""
        self._remaining = num_bytes
        self._on_done = on_done

    def settle(self, share: int) -> None:
        """Count a parcel's share as settled. Only one thread may call this."""
        self._remaining -= share
        if self._remaining == 0:
            self._on_done()


@dataclass(slots=True)
class Parcel:
    """One message for the store, sent again until the store acknowledges or rejects it."""

    capture_id: str
    content: Piece | store_pb2.RowLoss
    delivery: Delivery
    share: int
    """How many bytes of the delivery it settles; a loss that the worker reported counts as 1."""
    resent: bool = False
    """Whether it was sent again because the store found its checksum wrong."""
    tenant: str = ""
    """The tenant of the capture."""
    attempt: int = 0
    """The attempt of the capture; see capture.proto."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload; a loss counts as 0."""
        return len(self.content.payload) if isinstance(self.content, Piece) else 0

    def encode(self, number: int, shared: SharedRings | None = None) -> bytes:
        """Return the serialised AppendChunksRequest with this number.

        Args:
            number: The message's number.
            shared: The rings that the store has. A payload in one of them stays there, unless it was damaged before.
        """
        if isinstance(self.content, Piece):
            place = shared.find(self.content.payload) if shared is not None and not self.resent else None
            if place is not None:
                return placed_message(number, self, self.content, place)
            return append_message(number, self.capture_id, self.content, self.tenant, self.attempt)
        message = store_pb2.AppendChunksRequest(
            number=number,
            capture_id=self.capture_id,
            tenant=self.tenant,
            attempt=self.attempt,
            loss=self.content,
        )
        return message.SerializeToString()

    def target_bytes(self, shared: SharedRings) -> int:
        """Return the size of the parcels in which this one's rows are to travel: as `encode` will send them."""
        if self.resent or not isinstance(self.content, Piece):
            return TARGET_CHUNK_BYTES
        return shared.target_bytes(self.content.payload)

    def split(self, target_bytes: int) -> list[Parcel]:
        """Return parcels of at most `target_bytes` with the same rows, in order; only one layer may be larger."""
        if not isinstance(self.content, Piece) or len(self.content.payload) <= target_bytes:
            return [self]
        pieces = cut(self.content.header, self.content.payload, target_bytes)
        return [replace(self, content=piece, share=len(piece.payload)) for piece in pieces]

    def settle(self) -> None:
        """Count the parcel as settled. Only one thread may call this."""
        self.delivery.settle(self.share)

    def as_loss(self, detail: str) -> Parcel | None:
        """Return a loss report to send instead of this parcel's rows; None if the parcel is a loss report already.

        The delivery is finished only when the store acknowledges the report, so no row is lost silently.
        """
        if not isinstance(self.content, Piece):
            return None
        loss = write_failed(self.content.header, detail)
        return replace(self, content=loss, resent=False)


def placed_message(number: int, parcel: Parcel, piece: Piece, place: Place) -> bytes:
    """Return the AppendChunksRequest of a piece that stays in its ring."""
    layers = frames.layer_parts(piece.header, piece.payload)
    checksums = [frames.checksum(layer) for layer in layers]
    placed = store_pb2.PlacedChunk(
        header=piece.header,
        crc32c=combined(checksums, len(layers[0])),
        offset=place.offset,
        num_bytes=len(piece.payload),
        layer_crc32c=checksums,
    )
    return frames.placed_append(number, parcel.capture_id, placed, place.key, parcel.tenant, parcel.attempt)


def extent_parcels(
    path: str,
    headers: Sequence[capture_pb2.ChunkHeader],
    rows: memoryview,
    on_done: Callable[[], None],
    target_bytes: Callable[[], int],
) -> Iterator[Parcel]:
    """Yield the parcels of an extent, one at a time as the caller takes them.

    Rows that do not fit any chunk become a loss report.

    Args:
        path: The capture that the rows belong to, and its tenant; see `tenant_path`.
        headers: The headers of the rows, with known element types.
        rows: Exactly the payloads of the headers, in order.
        on_done: Called once the last parcel is settled.
        target_bytes: Returns the size of parcels that can probably travel; see `Parcel.target_bytes`.
    """
    tenant, capture_id, attempt = split_path(path)
    make = partial(Parcel, capture_id, tenant=tenant, attempt=attempt)
    delivery = Delivery(len(rows), on_done)
    end = 0
    for header in headers:
        start, end = end, end + payload_bytes(header)
        try:
            pieces = cut(header, rows[start:end], target_bytes())
        except ValueError as error:
            yield make(write_failed(header, str(error)), delivery, end - start)
        else:
            for piece in pieces:
                yield make(piece, delivery, len(piece.payload))


def loss_parcels(path: str, loss: store_pb2.RowLoss, on_done: Callable[[], None]) -> list[Parcel]:
    """Return the single parcel of a loss report."""
    tenant, capture_id, attempt = split_path(path)
    return [Parcel(capture_id, loss, Delivery(1, on_done), share=1, tenant=tenant, attempt=attempt)]


def write_failed(header: capture_pb2.ChunkHeader, detail: str) -> store_pb2.RowLoss:
    """Return a loss report for all rows of a header."""
    return store_pb2.RowLoss(
        sequence=header.sequence,
        sites=[header.site],
        layers=header.layers,
        positions=header.positions,
        reason=capture_pb2.INCOMPLETE_REASON_WRITE_FAILED,
        detail=detail,
    )
