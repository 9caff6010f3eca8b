"""The worker's connections to its shippers. They hand out extents, take them back, and reassign a lost shipper's.

All of this runs in the engine's process, where a thread that runs Python keeps the engine's thread from running any. To
give it back takes a while, too: a sleeping thread has to wake up. So few threads wake up, and seldom: the thread that
submits items also sends them, and acknowledgements gather before they are handled.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from inference_svc.shipping.protocol import Done, Hello, Leaving, Message, MessageReader, ProtocolError
from svc_common.logs import get_logger

_RECEIVE_BYTES = 1 << 10
"""About 80 acknowledgements. More of them would hold the caller's lock for longer at a time."""
_TICK_SECONDS = 1.0
_PAUSE_MS = 20
_CREDENTIALS = struct.Struct("3i")

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Item:
    """An extent or a loss report. A shipper has it until it sends Done."""

    ticket: int
    capture_id: str
    message: bytes
    """The message that hands it to a shipper."""
    num_bytes: int = 0
    """Bytes of the extent's rows; 0 for a loss report."""


class _Link:
    """The connection to one shipper, and the items that the shipper has."""

    def __init__(self, connection: socket.socket, serial: int) -> None:
        self.connection = connection
        self.serial = serial
        self.pid = _peer_pid(connection)
        self.reader = MessageReader()
        self.unsent = bytearray()
        self.awaits_room = False  # whether epoll reports when the socket has room for unsent bytes
        self.items: dict[int, Item] = {}  # by ticket, in the order they were handed over
        self.captures: Counter[str] = Counter()  # the number of items of each capture
        self.num_bytes = 0  # of the rows of all items
        self.leaving = False

    def give(self, item: Item) -> None:
        """Add an item, to be sent."""
        self.items[item.ticket] = item
        self.captures[item.capture_id] += 1
        self.num_bytes += item.num_bytes
        self.unsent += item.message

    def take(self, ticket: int) -> None:
        """Remove an item that the shipper is done with."""
        item = self.items.pop(ticket)
        self.num_bytes -= item.num_bytes
        self.captures[item.capture_id] -= 1
        if not self.captures[item.capture_id]:
            del self.captures[item.capture_id]


class Dispatcher:
    """Serves the control socket.

    `submit` sends items. A thread does the rest: it wakes up for new shippers, for what shippers send, for room in a
    socket that was full, and once a second.

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
        on_done: Callable[[Sequence[int]], None],
        on_failed: Callable[[BaseException], None],
        on_round: Callable[[], None] = lambda: None,
        may_pause: Callable[[], bool] = lambda: False,
    ) -> None:
        """Bind the control socket. Shippers can connect at once; `start` starts to serve them.

        Args:
            control_path: The socket's path. Its directory must be private (0700): any process that connects gets the
                ring.
            hello: The first message to every shipper.
            ring_descriptor: The ring's file descriptor, which the caller keeps and closes.
            on_done: Called on the thread with the tickets of items that a shipper has sent Done for.
            on_failed: Called on the thread if it ends with an error.
            on_round: Called on the thread after each round of events, at least once a second.
            may_pause: Called on the thread after each round: whether it may let acknowledgements gather for 20 ms. To
                wake up costs more than to handle one. `wake` ends a pause.

        Raises:
            OSError: The socket cannot listen at the path, for example because the path is too long.
        """
        self._hello = hello.encode()
        self._ring_descriptor = ring_descriptor
        self._on_done = on_done
        self._on_failed = on_failed
        self._on_round = on_round
        self._may_pause = may_pause
        self._lock = threading.Lock()  # guards the inbox, the links, and all of a link but its reader
        self._inbox: deque[Item] = deque()
        self._links: list[_Link] = []
        self._next_serial = 0
        self._stopping = False
        self.is_pausing = False
        """Whether the thread lets acknowledgements gather."""
        self._path = control_path
        self._listener = _listen(control_path)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pause = select.poll()
        self._pause.register(self._wake, select.POLLIN)
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}  # by file descriptor
        self._handle(self._listener.fileno(), self._accept)
        self._handle(self._wake, self._woken)
        self._thread = threading.Thread(target=self._run, name="residuum-dispatcher", daemon=True)

    @property
    def num_links(self) -> int:
        """How many connected shippers take items."""
        return sum(not link.leaving for link in self._links)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, items: Sequence[Item]) -> None:
        """Send items to shippers, from any thread. If no shipper takes items, they wait for one in the inbox."""
        with self._lock:
            if not self._stopping:
                self._inbox.extend(items)
                self._hand_out()

    def wake(self) -> None:
        """End a pause of the thread, from any thread."""
        with self._lock:
            if not self._stopping:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Close all connections and end the thread. Shippers still deliver the items that they have."""
        with self._lock:
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
                for descriptor, events in self._epoll.poll(_TICK_SECONDS):
                    self._handlers[descriptor](events)
                self._on_round()
                if self._may_pause():
                    self.is_pausing = True
                    self._pause.poll(_PAUSE_MS)
                    self.is_pausing = False
        except Exception as error:  # noqa: BLE001 - on_failed wakes the threads that wait for room in the ring
            _log.exception("dispatcher failed")
            self._on_failed(error)
        finally:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._stopping = True
            self._epoll.close()
            for connection in [self._listener, *(link.connection for link in self._links)]:
                connection.close()
            self._links.clear()
        self._path.unlink(missing_ok=True)

    def _handle(self, descriptor: int, handler: Callable[[int], None]) -> None:
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

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
        self._handle(connection.fileno(), lambda events: self._serve(link, events))
        with self._lock:
            self._links.append(link)
            self._hand_out()
        _log.info("shipper connected", shipper=link.pid, shippers=len(self._links))

    def _serve(self, link: _Link, events: int) -> None:
        try:
            if events & ~select.EPOLLOUT:
                self._receive(link)
            if events & select.EPOLLOUT:
                with self._lock:
                    self._send(link)
        except (OSError, ProtocolError) as error:
            self._drop(link, error)

    def _receive(self, link: _Link) -> None:
        data = link.connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the shipper closed the connection")
        done: list[int] = []
        try:
            for message in link.reader.feed(data):
                self._take(link, message, done)
        finally:
            if done:
                self._on_done(done)  # without the lock: callers of `submit` may hold theirs

    def _take(self, link: _Link, message: Message, done: list[int]) -> None:
        with self._lock:
            if isinstance(message, Done) and message.ticket in link.items:
                link.take(message.ticket)
                done.append(message.ticket)
            elif isinstance(message, Leaving):
                link.leaving = True
            else:
                raise ProtocolError(f"a shipper must not send {type(message).__name__} at this point")

    def _drop(self, link: _Link, error: Exception) -> None:
        with self._lock:
            self._links.remove(link)
            descriptor = link.connection.fileno()
            del self._handlers[descriptor]
            self._epoll.unregister(descriptor)  # `close` alone does not: a process that starts now may have a copy
            link.connection.close()
            # In front of newer items, in the old order: a capture is complete only when its oldest items are stored.
            self._inbox.extendleft(reversed(link.items.values()))
            self._hand_out()
        _log.info("shipper lost", shipper=link.pid, why=str(error), redelivered=len(link.items))

    def _hand_out(self) -> None:
        """Send what is in the inbox. Call it with the lock."""
        accepting = [link for link in self._links if not link.leaving]
        if not accepting:
            return  # items stay in the inbox until a shipper connects
        touched: dict[int, _Link] = {}
        while self._inbox:
            item = self._inbox.popleft()
            link = _choose(accepting, item.capture_id)
            link.give(item)
            touched[link.serial] = link
        for link in touched.values():
            with contextlib.suppress(OSError):  # the thread learns of it too, and drops the link
                self._send(link)

    def _send(self, link: _Link) -> None:
        """Send what fits the socket, and have epoll report when there is room for the rest. Call it with the lock."""
        if link.unsent:
            with contextlib.suppress(BlockingIOError):
                del link.unsent[: link.connection.send(link.unsent)]
        if link.awaits_room != bool(link.unsent):
            link.awaits_room = bool(link.unsent)
            wanted = select.EPOLLIN | (select.EPOLLOUT if link.awaits_room else 0)
            self._epoll.modify(link.connection.fileno(), wanted)


def _choose(links: list[_Link], capture_id: str) -> _Link:
    """Pick the link for an item of a capture."""
    if len(links) == 1:
        return links[0]
    holder = next((link for link in links if capture_id in link.captures), None)
    return holder or min(links, key=attrgetter("num_bytes"))


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
