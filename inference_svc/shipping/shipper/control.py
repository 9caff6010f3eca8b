"""The shipper's side of a worker's control socket. It turns items into parcels, and gives acknowledged items back."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from inference_svc.shipping.framing import payload_bytes
from inference_svc.shipping.protocol import (
    PROTOCOL_VERSION,
    Done,
    ExtentReady,
    Hello,
    Leaving,
    LossReport,
    Message,
    MessageReader,
    ProtocolError,
)
from inference_svc.shipping.ring import Extent, SharedRing
from inference_svc.shipping.shipper.parcels import Parcel, extent_parcels, loss_parcels
from inference_svc.shipping.shipper.shared_rings import Rings
from residuum.wire.limits import TARGET_CHUNK_BYTES
from svc_common.backoff import Backoff
from svc_common.logs import get_logger

_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 1.0
_RECEIVE_BYTES = 1 << 16
_SEND_TIMEOUT = struct.pack("@ll", 10, 0)
"""A timeval of 10 seconds. A worker that does not read for longer, such as one in a debugger, must not delay others."""

Put = Callable[[str, Iterable[Parcel]], None]
"""Takes a capture's path (see `tenant_path`) and its parcels. Never waits, and iterates over the parcels later."""

_log = get_logger(__name__)


class ControlClient:
    """Serves one worker on a thread of its own. When the worker ends, it waits for a successor at the same path.

    The mapping here keeps the ring's memory after the worker has ended, so the shipper still sends the items it has.
    """

    def __init__(self, path: Path, put: Put, rings: Rings | None = None) -> None:
        """Prepare to pass the parcels of the worker at `path` to `put`, and its ring to `rings`; `start` starts it."""
        self._path = path
        self._rings = rings
        self._put = put
        self._leaving = threading.Event()
        self._lock = threading.Lock()  # guards the session
        self._session: _Session | None = None
        self._thread = threading.Thread(target=self._run, name="residuum-control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs. It ends after `leave` or `close`, or by a defect."""
        return self._thread.is_alive()

    def leave(self) -> None:
        """Ask the worker for no more items. Items that it has handed over are still given back."""
        with self._lock:
            self._leaving.set()
            if self._session is not None:
                self._session.send(Leaving())

    def close(self) -> None:
        """Close the connection and end the thread. The worker hands items without a Done to another shipper."""
        with self._lock:
            self._leaving.set()
            if self._session is not None:
                self._session.shut_down()
        self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        while not self._leaving.is_set():
            try:
                connection = _connect(self._path)
            except OSError:
                self._leaving.wait(backoff.next_delay())  # the worker may still be loading its model
                continue
            backoff.reset()
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        session = _Session(connection, self._put, self._rings)
        with self._lock:
            if self._leaving.is_set():
                connection.close()
                return
            self._session = session
        _log.info("worker connected", control=str(self._path))
        try:
            session.run()
        except (OSError, ProtocolError) as error:
            _log.warning("worker connection failed", control=str(self._path), error=str(error))
            self._leaving.wait(_LONGEST_DELAY_SECONDS)
        finally:
            with self._lock:
                self._session = None
            session.close()
        _log.info("worker disconnected", control=str(self._path))


class _Session:
    """One connection to a worker, and that worker's ring."""

    def __init__(self, connection: socket.socket, put: Put, rings: Rings | None) -> None:
        self._connection = connection
        self._rings = rings
        self._put = put
        self._sending = threading.Lock()
        self._ring: SharedRing | None = None

    def run(self) -> None:
        """Take the worker's messages until it closes the connection."""
        reader = MessageReader()
        data, descriptors, _, _ = socket.recv_fds(self._connection, _RECEIVE_BYTES, 1)
        try:
            while data:
                for message in reader.feed(data):
                    self._take(message, descriptors)
                data = self._connection.recv(_RECEIVE_BYTES)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def send(self, message: Message) -> None:
        """Send a message to the worker; do nothing if it has disconnected."""
        with self._sending:
            try:
                self._connection.sendall(message.encode())
            except OSError:
                # The worker has ended, or is stuck and may have got half a message. Only a new connection helps.
                self.shut_down()

    def shut_down(self) -> None:
        """Make `run` return."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with self._sending:
            self._connection.close()

    def _take(self, message: Message, descriptors: list[int]) -> None:
        try:
            self._handle(message, descriptors)
        except (IndexError, ValueError) as error:
            raise ProtocolError(f"{type(message).__name__} does not fit the ring: {error}") from error

    def _handle(self, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, Hello) and self._ring is None and descriptors:
            self._ring = _attach(message, descriptors[0])
            if self._rings is not None:
                with contextlib.suppress(OSError):  # without it, payloads travel in messages
                    self._rings.add(self._ring, descriptors[0])
        elif isinstance(message, ExtentReady) and self._ring is not None:
            self._take_extent(message, self._ring)
        elif isinstance(message, LossReport):
            done = Done(message.ticket)
            self._put(message.capture_id, loss_parcels(message.capture_id, message.loss, lambda: self.send(done)))
        else:
            raise ProtocolError(f"a worker must not send {type(message).__name__} at this point")

    def _target_bytes(self) -> int:
        return TARGET_CHUNK_BYTES if self._rings is None else self._rings.target_bytes

    def _take_extent(self, message: ExtentReady, ring: SharedRing) -> None:
        rows = ring.view(Extent(message.offset, sum(map(payload_bytes, message.headers)))).data
        self._put(
            message.capture_id,
            extent_parcels(
                message.capture_id, message.headers, rows, lambda: self.send(Done(message.ticket)), self._target_bytes
            ),
        )


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def _attach(hello: Hello, descriptor: int) -> SharedRing:
    if hello.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the worker speaks version {hello.version} of the protocol, this shipper version {PROTOCOL_VERSION}; run "
            "both from the same installation of residuum"
        )
    return SharedRing.attach(descriptor, hello.ring_bytes)
