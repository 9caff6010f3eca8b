"""The worker's thread for its shippers. It hands out extents, takes them back, and reassigns a lost shipper's."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path

from inference_svc.shipping.framing import payload_bytes
from inference_svc.shipping.protocol import (
    Done,
    ExtentReady,
    Hello,
    Leaving,
    LossReport,
    Message,
    MessageReader,
    ProtocolError,
)
from svc_common.logs import get_logger

Item = ExtentReady | LossReport
"""An extent or a loss report. A shipper has it until it sends Done."""

_RECEIVE_BYTES = 1 << 16
_TICK_SECONDS = 1.0
_CREDENTIALS = struct.Struct("3i")

_log = get_logger(__name__)


class _Link:
    """The connection to one shipper, and the items that the shipper has."""

    def __init__(self, connection: socket.socket, serial: int) -> None:
        self.connection = connection
        self.serial = serial
        self.pid = _peer_pid(connection)
        self.reader = MessageReader()
        self.unsent = bytearray()
        self.items: dict[int, Item] = {}  # by ticket, in the order they were handed over
        self.captures: Counter[str] = Counter()  # the number of items of each capture
        self.num_bytes = 0  # of the rows of all items
        self.leaving = False

    def give(self, item: Item) -> None:
        """Add an item, to be sent."""
        self.items[item.ticket] = item
        self.captures[item.capture_id] += 1
        self.num_bytes += _num_bytes(item)
        self.unsent += item.encode()

    def take(self, ticket: int) -> Item:
        """Remove an item that the shipper is done with."""
        item = self.items.pop(ticket)
        self.num_bytes -= _num_bytes(item)
        self.captures[item.capture_id] -= 1
        if not self.captures[item.capture_id]:
            del self.captures[item.capture_id]
        return item


class Dispatcher:
    """Serves the control socket on one thread, which wakes up for events and once a second.

    Every submitted item is in exactly one place: in the inbox, where no shipper has it yet, or in the link of the
    shipper that has it. A link that ends returns all its items to the inbox. So each item is delivered at least once,
    until some shipper sends Done. The store ignores rows that it gets a second time.

    An item goes to the shipper that has other items of its capture, so that they arrive in order. Otherwise it goes to
    the shipper with the fewest bytes.
    """

    def __init__(
        self,
        control_path: Path,
        hello: Hello,
        ring_descriptor: int,
        *,
        on_done: Callable[[Item], None],
        on_failed: Callable[[BaseException], None],
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind the control socket. Shippers can connect at once; `start` starts to serve them.

        Args:
            control_path: The socket's path. Its directory must be private (0700): any process that connects gets the
                ring.
            hello: The first message to every shipper.
            ring_descriptor: The ring's file descriptor, which the caller keeps and closes.
            on_done: Called on the thread with each item that a shipper sends Done for.
            on_failed: Called on the thread if it ends with an error.
            on_round: Called on the thread after each round of events, at least once a second.

        Raises:
            OSError: The socket cannot listen at the path, for example because the path is too long.
        """
        self._hello = hello.encode()
        self._ring_descriptor = ring_descriptor
        self._on_done = on_done
        self._on_failed = on_failed
        self._on_round = on_round
        self._inbox: deque[Item] = deque()
        self._links: list[_Link] = []
        self._next_serial = 0
        self._stopping = False
        self._path = control_path
        self._listener = _listen(control_path)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name="residuum-dispatcher", daemon=True)

    @property
    def num_links(self) -> int:
        """How many connected shippers take items."""
        return sum(not link.leaving for link in self._links)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, item: Item) -> None:
        """Hand over an item, from any thread. The caller must not change it afterwards: the thread serialises it."""
        self._inbox.append(item)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Close all connections and end the thread. Shippers still deliver the items that they have."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(_TICK_SECONDS):
                    key.data(events)
                self._hand_out()
                self._on_round()
        except Exception as error:  # noqa: BLE001 - on_failed wakes the threads that wait for room in the ring
            _log.exception("dispatcher failed")
            self._on_failed(error)
        finally:
            self._close()

    def _close(self) -> None:
        self._selector.close()
        for connection in [self._listener, *(link.connection for link in self._links)]:
            connection.close()
        self._links.clear()
        self._path.unlink(missing_ok=True)

    def _woken(self, _events: int) -> None:
        os.eventfd_read(self._wake)

    def _accept(self, _events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # the shipper has already disconnected
        connection.setblocking(False)
        link = _Link(connection, self._next_serial)
        self._next_serial += 1
        try:
            # One call suffices: the first message always fits the buffer of a fresh socket.
            socket.send_fds(connection, [self._hello], [self._ring_descriptor])
        except OSError:
            connection.close()
            return
        self._links.append(link)
        self._selector.register(connection, selectors.EVENT_READ, lambda events: self._serve(link, events))
        _log.info("shipper connected", shipper=link.pid, shippers=len(self._links))

    def _serve(self, link: _Link, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._receive(link)
            self._send(link)
        except (OSError, ProtocolError) as error:
            self._drop(link, error)

    def _receive(self, link: _Link) -> None:
        data = link.connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the shipper closed the connection")
        for message in link.reader.feed(data):
            self._handle(link, message)

    def _handle(self, link: _Link, message: Message) -> None:
        if isinstance(message, Leaving):
            link.leaving = True
        elif isinstance(message, Done) and message.ticket in link.items:
            self._on_done(link.take(message.ticket))
        else:
            raise ProtocolError(f"a shipper must not send {type(message).__name__} at this point")

    def _drop(self, link: _Link, error: Exception) -> None:
        self._links.remove(link)
        self._selector.unregister(link.connection)
        link.connection.close()
        # In front of newer items, in the old order: a capture is complete only when its oldest items are stored.
        self._inbox.extendleft(reversed(link.items.values()))
        _log.info("shipper lost", shipper=link.pid, why=str(error), redelivered=len(link.items))

    def _hand_out(self) -> None:
        accepting = [link for link in self._links if not link.leaving]
        if not accepting:
            return  # items stay in the inbox until a shipper connects
        touched: dict[int, _Link] = {}
        while self._inbox:
            item = self._inbox.popleft()
            link = _choose(accepting, item.capture_id)
            link.give(item)
            touched[link.serial] = link
        self._send_all(touched.values())

    def _send_all(self, links: Iterable[_Link]) -> None:
        for link in links:
            try:
                self._send(link)
            except OSError as error:
                self._drop(link, error)
                os.eventfd_write(self._wake, 1)  # another round, for the items that the link returned

    def _send(self, link: _Link) -> None:
        if link.unsent:
            with contextlib.suppress(BlockingIOError):
                del link.unsent[: link.connection.send(link.unsent)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        key = self._selector.get_key(link.connection)
        if key.events != wanted:
            self._selector.modify(link.connection, wanted, key.data)


def _choose(links: list[_Link], capture_id: str) -> _Link:
    """Pick the link for an item of a capture."""
    holder = next((link for link in links if capture_id in link.captures), None)
    return holder or min(links, key=attrgetter("num_bytes"))


def _num_bytes(item: Item) -> int:
    return sum(map(payload_bytes, item.headers)) if isinstance(item, ExtentReady) else 0


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # the socket of an earlier worker that died
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen for shippers: {error}. Choose a shorter path in a folder you own", str(path)
        ) from error
    return listener


def _peer_pid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(credentials)
    return int(pid)
