"""The messages between a worker and a shipper, over a Unix domain socket. They are length-prefixed and not pickled.

    worker:  Hello, with the ring's file descriptor
    worker:  ExtentReady {ticket 1, offset 0, capture A, headers}
    worker:  LossReport {ticket 2, capture B, loss}
    shipper: Done {ticket 2}
    shipper: Done {ticket 1}       from here on the worker may reuse those bytes
    shipper: Leaving               it takes no more items; Done still follows for the items that it has

A ticket names one item, and no later item reuses it. So a late Done cannot free bytes that hold other rows by then.
Numbers are little-endian. A message is the length of its body (uint32), its kind (uint8) and its body.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from residuum.v1 import capture_pb2, store_pb2

PROTOCOL_VERSION: Final = 2
MAX_BODY_BYTES: Final = 16 << 20
"""Far above the headers of any extent. A longer body cannot be a message of this protocol."""

_PREFIX = struct.Struct("<IB")
_HELLO = struct.Struct("<HQ")
_EXTENT = struct.Struct("<QQH")
_HEADER = struct.Struct("<I")
_LOSS = struct.Struct("<QH")
_DONE = struct.Struct("<Q")


class ProtocolError(Exception):
    """The peer sent bytes that are not a valid message at this point."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker's first message; the ring's file descriptor travels with it."""

    ring_bytes: int
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        """Return the message's bytes."""
        return _message(1, _HELLO.pack(self.version, self.ring_bytes))


@dataclass(frozen=True, slots=True)
class ExtentReady:
    """Hands an extent to the shipper, which may read it until it sends Done."""

    ticket: int
    offset: int
    """Where in the ring the extent begins, in bytes."""
    capture_id: str
    headers: tuple[capture_pb2.ChunkHeader, ...]
    """One or more. Their payloads, each [layers][positions][width], follow each other from the offset on."""

    def encode(self) -> bytes:
        """Return the message's bytes.

        Raises:
            ValueError: The headers do not fit a message.
        """
        headers = [header.SerializeToString() for header in self.headers]
        return extent_ready(self.ticket, self.offset, self.capture_id, headers)


@dataclass(frozen=True, slots=True)
class LossReport:
    """Reports rows that will never arrive. The shipper passes the report on to the store."""

    ticket: int
    capture_id: str
    loss: store_pb2.RowLoss

    def encode(self) -> bytes:
        """Return the message's bytes."""
        capture_id = self.capture_id.encode()
        head = _LOSS.pack(self.ticket, len(capture_id))
        return _message(3, head + capture_id + self.loss.SerializeToString())


@dataclass(frozen=True, slots=True)
class Done:
    """The store has acknowledged the ticket's item. If it is an extent, the worker may reuse its bytes."""

    ticket: int

    def encode(self) -> bytes:
        """Return the message's bytes."""
        return _message(4, _DONE.pack(self.ticket))


@dataclass(frozen=True, slots=True)
class Leaving:
    """The shipper is stopping and takes no more items."""

    def encode(self) -> bytes:
        """Return the message's bytes."""
        return _message(5, b"")


Message = Hello | ExtentReady | LossReport | Done | Leaving


class MessageReader:
    """Reads messages from the bytes of a socket, in pieces of any size."""

    def __init__(self) -> None:
        """Start with no bytes."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take more bytes and yield the messages that are complete now.

        Raises:
            ProtocolError: The bytes are not messages of this protocol.
        """
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            size, kind = _PREFIX.unpack_from(self._buffer)
            if size > MAX_BODY_BYTES:
                raise ProtocolError(f"a message has {size} bytes, but at most {MAX_BODY_BYTES} are allowed")
            end = _PREFIX.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_PREFIX.size : end])
            del self._buffer[:end]
            yield _decode(kind, body)


def extent_ready(ticket: int, offset: int, capture_id: str, headers: Sequence[bytes]) -> bytes:
    """Return the bytes of an `ExtentReady` whose headers are serialised already.

    Raises:
        ValueError: The headers do not fit a message.
    """
    name = capture_id.encode()
    parts = [_EXTENT.pack(ticket, offset, len(name)), name]
    for header in headers:
        parts += (_HEADER.pack(len(header)), header)
    return _message(2, b"".join(parts))


def _message(kind: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{len(body)} bytes do not fit a message, which holds at most {MAX_BODY_BYTES}")
    return _PREFIX.pack(len(body), kind) + body


def _decode(kind: int, body: bytes) -> Message:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ProtocolError(f"unknown message kind {kind}")
    try:
        return decoder(body)
    except (struct.error, DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message of kind {kind}: {error}") from None


def _decode_hello(body: bytes) -> Hello:
    version, ring_bytes = _HELLO.unpack(body)
    return Hello(ring_bytes, version)


def _decode_extent(body: bytes) -> ExtentReady:
    ticket, offset, id_bytes = _EXTENT.unpack_from(body)
    headers_start = _EXTENT.size + id_bytes
    headers = tuple(_decode_headers(body, headers_start))
    return ExtentReady(ticket, offset, body[_EXTENT.size : headers_start].decode(), headers)


def _decode_headers(body: bytes, offset: int) -> Iterator[capture_pb2.ChunkHeader]:
    if offset >= len(body):
        raise struct.error("it has no header")
    while offset < len(body):
        (size,) = _HEADER.unpack_from(body, offset)
        offset += _HEADER.size
        if offset + size > len(body):
            raise struct.error("a header is cut off")
        yield capture_pb2.ChunkHeader.FromString(body[offset : offset + size])
        offset += size


def _decode_loss(body: bytes) -> LossReport:
    ticket, id_bytes = _LOSS.unpack_from(body)
    loss_start = _LOSS.size + id_bytes
    return LossReport(ticket, body[_LOSS.size : loss_start].decode(), store_pb2.RowLoss.FromString(body[loss_start:]))


def _decode_done(body: bytes) -> Done:
    return Done(*_DONE.unpack(body))


def _decode_leaving(body: bytes) -> Leaving:
    if body:
        raise struct.error("it must not have a body")
    return Leaving()


_DECODERS: dict[int, Callable[[bytes], Message]] = {
    1: _decode_hello,
    2: _decode_extent,
    3: _decode_loss,
    4: _decode_done,
    5: _decode_leaving,
}
