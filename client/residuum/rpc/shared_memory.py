"""Gives a piece of memory to a store on the same machine. Clients use it to read, and shippers to write."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys

from residuum.wire.rows.shared_memory import (
    KEY_BYTES,
    MAX_MESSAGE_BYTES,
    Hello,
    SharedMemoryError,
    decode_welcome,
)

_SECONDS = 2.0
"""How long a store may take to accept a memory."""

SWITCH = "RESIDUUM_SHARED_MEMORY"
"""The environment variable that switches shared memory off for clients, shippers and stores."""


def is_possible() -> bool:
    """Tell whether this system has what shared memory needs: Linux."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")


def is_switched_off() -> bool:
    """Tell whether the environment switches shared memory off."""
    return os.environ.get(SWITCH, "").strip().lower() in {"off", "0", "false", "no"}


def create_memory(num_bytes: int) -> int:
    """Return the descriptor of a new memory that cannot change its size, all of it allocated.

    The store adds the seal that keeps its pages allocated; with it, no process can map the memory for writing any more.

    Raises:
        OSError: There is not enough memory.
    """
    import fcntl

    descriptor = os.memfd_create("residuum-read", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class GivenMemory:
    """A memory that a store has. The store gives it up when the connection is closed."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        """Wrap a connection; use `give_memory`."""
        self._connection = connection
        self.key = key
        """Names the memory in calls."""

    def send(self, message: bytes) -> bool:
        """Send a message without waiting; return whether it was sent."""
        try:
            self._connection.send(message)
        except OSError:
            return False
        return True

    def is_held(self) -> bool:
        """Tell whether the store still has the memory: it sends nothing after its answer until it closes."""
        try:
            self._connection.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Take the memory back."""
        self._connection.close()

    __del__ = close  # a client that nobody closed


def give_memory(path: str, instance: bytes, kind: int, descriptor: int) -> GivenMemory:
    """Give a memory to a store. This waits for the store, at most two seconds for each of two steps.

    Args:
        path: The store's socket.
        instance: The store's instance.
        kind: READ or WRITE.
        descriptor: The memory's descriptor. The caller keeps it.

    Raises:
        OSError: The socket cannot be used from here.
        SharedMemoryError: The store does not accept the memory, or another store answers.
    """
    if not os.path.isabs(path):  # noqa: PTH117 - one check, no path object otherwise
        raise SharedMemoryError(f"the store names the socket {path!r}, which is no absolute path")
    key = secrets.token_bytes(KEY_BYTES)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        connection.settimeout(_SECONDS)
        connection.connect(path)
        socket.send_fds(connection, [Hello(kind, key).encode()], [descriptor])
        answer = connection.recv(MAX_MESSAGE_BYTES)
        if not answer:
            raise SharedMemoryError("the store refused the memory; its log says why")
        if decode_welcome(answer) != instance:
            raise SharedMemoryError(f"another store answers at {path}")
        connection.setblocking(False)
        stack.pop_all()
    return GivenMemory(connection, key)
