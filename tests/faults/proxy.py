"""A proxy between a shipper and its store that changes bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence


class Proxy:
    """Forwards bytes in both directions over its own TCP port. Bytes to the store pass through `change`."""

    def __init__(self, port: int, change: Callable[[bytes], bytes]) -> None:
        self._port = port
        self._change = change
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._begin(self._accept)

    def close(self) -> None:
        for connection in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join()

    def _begin(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                shipper, _ = self._listener.accept()
                store = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [shipper, store]
                self._begin(self._pass_on, shipper, store, self._change)
                self._begin(self._pass_on, store, shipper, bytes)

    def _pass_on(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data))
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Flipper:
    """Flips a bit in the first complete rows of a list that pass: once, or every time.

    An HTTP/2 frame or a read may split a row, so pass several rows of one chunk.
    """

    def __init__(self, rows: Sequence[bytes], *, once: bool) -> None:
        self._rows = rows
        self._once = once
        self.flipped = 0

    def __call__(self, data: bytes) -> bytes:
        at = max(data.find(row) for row in self._rows)
        if at < 0 or (self._once and self.flipped):
            return data
        self.flipped += 1
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
