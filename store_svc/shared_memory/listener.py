"""The Unix socket on which peers give memories to the store."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

from residuum.rpc.shared_memory import is_possible
from residuum.wire.rows.shared_memory import (
    INSTANCE_BYTES,
    MAX_MESSAGE_BYTES,
    Hello,
    SharedMemoryError,
    encode_welcome,
)
from store_svc.shared_memory.memories import MAX_MEMORIES, Memories, Memory
from svc_common.logs import get_logger

_HELLO_SECONDS = 5.0
"""How long a peer may take to give its memory."""

_RETRY_SECONDS = 0.1

_MAX_PATH_BYTES = 107
"""The longest path of a Unix socket on Linux."""

_MAX_DESCRIPTORS = 4
"""Descriptors of a first message that are received, so that a peer that sends several is refused. The kernel closes
more than these."""

_LOG_SECONDS = 10.0
"""Peers that break a rule are logged at most this often."""

_log = get_logger(__name__)


class Listener:
    """Takes memories from peers, in a thread of its own."""

    def __init__(self, setting: str) -> None:
        """Listen.

        Args:
            setting: "auto" for a socket in a folder of this user, "off" for none, or the path of the socket.

        Raises:
            OSError: The path cannot be used. With "auto" the store then goes on without shared memory.
        """
        self.instance = secrets.token_bytes(INSTANCE_BYTES)
        """Random bytes that are new at each start."""
        self.memories = Memories(self._on_drop, self._choose_events)
        self.path = ""
        """The path of the socket; empty if there is none."""
        self._socket = _listen(setting)
        if self._socket is None:
            return
        self.path = _publish(str(self._socket.getsockname()))
        status = os.stat(self.path)  # noqa: PTH116 - a path of text, as everywhere here
        self._identity = (status.st_dev, status.st_ino)
        self._log_after = 0.0
        self._unlogged = 0
        self._lock = threading.Lock()  # guards the counters of the log
        self._waiting: dict[int, tuple[socket.socket, float]] = {}  # peers without a memory, and until when they may be
        self._given: dict[int, Memory] = {}
        self._closed_memories: list[Memory] = []
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._epoll.register(self._woken, select.EPOLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="shared-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, drop all memories, and remove the socket."""
        if self._socket is None:
            return
        self._stopping = True
        self._wake_up()
        self._thread.join()
        self._socket = None

    def _run(self) -> None:
        assert self._socket is not None  # noqa: S101 - the thread runs only with one
        while not self._stopping:
            for descriptor, _ in self._epoll.poll(1.0 if self._waiting else None):
                if descriptor == self._socket.fileno():
                    self._accept(self._socket)
                elif descriptor == self._woken.fileno():
                    self._close_dropped()
                elif descriptor in self._waiting:
                    self._greet(*self._waiting.pop(descriptor)[:1])
                elif descriptor in self._given:
                    self._watch(self._given[descriptor])
            self._refuse_late()
        self._end(self._socket)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:
            time.sleep(_RETRY_SECONDS)  # too many open files, perhaps: the peer still waits
            return
        connection.setblocking(False)
        if len(self._waiting) + len(self._given) >= MAX_MEMORIES:
            connection.close()
            self._note(SharedMemoryError(f"there are {MAX_MEMORIES} memories already"))
            return
        self._waiting[connection.fileno()] = connection, time.monotonic() + _HELLO_SECONDS
        self._epoll.register(connection, select.EPOLLIN)

    def _greet(self, connection: socket.socket) -> None:
        """Take the first message of a peer, and its memory."""
        try:
            memory = self._receive(connection)
        except BlockingIOError:  # the event was for an earlier connection with this number
            self._waiting[connection.fileno()] = connection, time.monotonic() + _HELLO_SECONDS
            return
        except (OSError, SharedMemoryError) as error:
            connection.close()
            self._note(error)
            return
        self._given[connection.fileno()] = memory
        try:
            connection.send(encode_welcome(self.instance))
        except OSError as error:
            self.memories.drop(memory, error)
            return
        with memory.lock:
            self._choose_events(memory)

    def _receive(self, connection: socket.socket) -> Memory:
        data, descriptors, _, _ = socket.recv_fds(
            connection, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if not data and not descriptors:
                raise _closed()
            if len(descriptors) != 1:
                raise SharedMemoryError(f"its first message has {len(descriptors)} descriptors, not 1")
            hello = Hello.decode(data)
            return self.memories.add(hello.kind, hello.key, connection, descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _choose_events(self, memory: Memory) -> None:
        """Choose what wakes this thread: releases only while no read uses the memory, which takes them itself."""
        events = select.EPOLLET | select.EPOLLRDHUP | (0 if memory.is_borrowed else select.EPOLLIN)
        with contextlib.suppress(OSError, ValueError):  # it was closed
            self._epoll.modify(memory.connection, events)

    def _watch(self, memory: Memory) -> None:
        """Notice that a peer has closed its connection, or breaks a rule while no read uses its memory."""
        try:
            memory.take_releases(only_if_idle=True)
        except (OSError, SharedMemoryError) as error:
            self.memories.drop(memory, error)
        else:
            if _has_ended(memory.connection):
                self.memories.drop(memory, _closed())

    def _on_drop(self, memory: Memory, why: Exception) -> None:
        self._note(why)
        self._closed_memories.append(memory)
        self._wake_up()

    def _close_dropped(self) -> None:
        """Close connections. Only this thread does, so that no other descriptor gets a number that is still watched."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._closed_memories:
            memory = self._closed_memories.pop()
            self._given.pop(memory.connection.fileno(), None)
            with memory.lock:
                memory.connection.close()

    def _refuse_late(self) -> None:
        now = time.monotonic()
        for descriptor in [number for number, (_, until) in self._waiting.items() if now >= until]:
            connection, _ = self._waiting.pop(descriptor)
            connection.close()
            self._note(SharedMemoryError(f"it gave no memory for {_HELLO_SECONDS:g} s"))

    def _end(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            status = os.stat(self.path)  # noqa: PTH116
            if (status.st_dev, status.st_ino) == self._identity:  # not that of a store that was started meanwhile
                os.unlink(self.path)  # noqa: PTH108
        listening.close()
        for connection, _ in self._waiting.values():
            connection.close()
        self._waiting.clear()
        self.memories.drop_all(OSError("the store is stopping"))
        self._close_dropped()
        for item in (self._epoll, self._wake, self._woken):
            item.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is awake already, or has ended
            self._wake.send(b"\0")

    def _note(self, why: Exception) -> None:
        """Log that a peer was refused. A peer that has gone is not worth a line."""
        if not isinstance(why, SharedMemoryError):
            return
        with self._lock:
            if time.monotonic() < self._log_after:
                self._unlogged += 1
                return
            unlogged, self._unlogged = self._unlogged, 0
            self._log_after = time.monotonic() + _LOG_SECONDS
        _log.warning("shared memory refused", why=str(why), not_logged_before=unlogged)


def _closed() -> OSError:
    return ConnectionResetError("the peer closed the connection")


def _has_ended(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _listen(setting: str) -> socket.socket | None:
    """Return a socket that listens at a new path beside the one that is wanted, for `_publish`; None without one."""
    if setting == "off" or not is_possible():
        return None
    if setting != "auto":
        return _bind(Path(setting).absolute(), 0o660)
    try:
        folder = _own_folder()
        _remove_stale(folder)
        return _bind(folder / f"store-{os.getpid()}-{secrets.token_hex(4)}.sock", 0o600)
    except OSError as error:
        _log.warning("no shared memory: its socket cannot be made; set --shared-memory", error=str(error))
        return None


_NEW = ".new"


def _bind(path: Path, mode: int) -> socket.socket:
    _check_path(path)
    temporary = f"{path}{_NEW}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # noqa: PTH108
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(temporary)
        os.chmod(temporary, mode)  # noqa: PTH101
        listening.listen(MAX_MEMORIES)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _publish(temporary: str) -> str:
    """Give a socket its name, once it accepts connections. This replaces one of a store that was killed."""
    path = temporary.removesuffix(_NEW)
    os.rename(temporary, path)  # noqa: PTH104
    return path


def _check_path(path: Path) -> None:
    """Check that a socket can be made at a path.

    Raises:
        OSError: It is too long, something else is there, or another store listens there.
    """
    if len(os.fsencode(path)) + len(_NEW) > _MAX_PATH_BYTES:
        raise OSError(f"the path of the socket for shared memory is too long: {path}")
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(f"{path} exists and is not a socket; choose another path for --shared-memory")
    if _is_live(path):
        raise OSError(f"another store listens at {path}; choose another path for --shared-memory")


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
        return True


def _own_folder() -> Path:
    """Return the folder of this user's sockets, made if it is missing.

    Raises:
        OSError: It belongs to another user, or others can use it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base, f"residuum-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} must be a folder that only this user can use")
    return folder


def _remove_stale(folder: Path) -> None:
    """Remove the sockets of stores that were killed. A socket gets such a name only when it accepts connections."""
    for path in folder.glob("store-*.sock"):
        if not _is_live(path):
            with contextlib.suppress(OSError):
                path.unlink()
