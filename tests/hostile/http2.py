"""A hostile HTTP/2 client: a plain socket, with frames from h2."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

import h2.config
import h2.connection
import h2.errors
import h2.exceptions

_SECONDS = 20.0


class Peer:
    """One connection that sends arbitrary frames."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_SECONDS)
        config = h2.config.H2Configuration(client_side=True, validate_outbound_headers=False)
        self.connection = h2.connection.H2Connection(config)
        self.connection.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.connection.data_to_send())

    def call(self, method: str, *more: tuple[str, str]) -> int:
        """Open a stream for a call; return its number."""
        stream = self.connection.get_next_available_stream_id()
        headers = [
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"), *more,
        ]  # fmt: skip
        self.connection.send_headers(stream, headers)
        self.flush()
        return stream

    def begin_message(self, stream: int, size: int, sent: int) -> int:
        """Announce a message of `size` bytes, send up to `sent` of them within the window, and return how many."""
        self.connection.send_data(stream, b"\0" + struct.pack(">I", size))
        done = 0
        while done < sent:
            room = min(self.connection.local_flow_control_window(stream), self.connection.max_outbound_frame_size)
            if not room and not self.listen():
                break
            part = min(room, sent - done)
            if part:
                self.connection.send_data(stream, bytes(part))
                self.flush()
                done += part
        return done

    def listen(self) -> bool:
        """Receive from the server; return whether anything came before it closed the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return False
        if data:
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self.connection.receive_data(data)
            with contextlib.suppress(OSError):
                self.flush()
        return bool(data)

    def reset(self, stream: int) -> None:
        self.connection.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)

    def close(self) -> None:
        self.socket.close()


def rapid_reset(port: int, count: int) -> int:
    """Open and reset streams as fast as possible; return how many before the server closed the connection."""
    return _repeat(port, count, lambda peer, _: peer.reset(peer.call("/residuum.v1.StoreService/GetStats")))


def ping_flood(port: int, count: int) -> int:
    """Send pings as fast as possible; return how many before the server closed the connection."""
    return _repeat(port, count, lambda peer, at: peer.connection.ping(at.to_bytes(8, "big")))


def huge_headers(port: int, size: int) -> int:
    """Call with this many bytes of headers in frames of the maximum size; return 1 if the server accepted them."""
    call = ("/residuum.v1.StoreService/GetStats", ("x-residuum", "x" * size))
    return _repeat(port, 1, lambda peer, _: peer.call(*call))


def _repeat(port: int, count: int, act: Callable[[Peer, int], object]) -> int:
    peer = Peer(port)
    for done in range(count):
        try:
            act(peer, done)
            peer.flush()
        except (OSError, h2.exceptions.ProtocolError):
            peer.close()
            return done
    peer.close()
    return count
