"""Ports for services that a test starts, or starts again on the same port.

A port that the kernel chose (port 0) may go to another socket while its service is away: to a client's connection, or
to a service of another test process. So these ports are outside the range that the kernel chooses from, and each test
process takes them from a block that it has locked.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRST, _END, _BLOCK = 15_000, 65_536, 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_lock = threading.Lock()


def reserve() -> int:
    """Return a free port on the loopback interface. No other test process and no client gets it."""
    with _lock:
        for port in itertools.islice(_own(os.getpid())[1], _BLOCK):
            if _is_free(port):
                return port
    raise RuntimeError(f"No port of a block of {_BLOCK} is free.")


@functools.cache
def _own(_pid: int) -> tuple[IO[str], Iterator[int]]:
    """Lock a block of ports, until this process ends. Return the lock, and the ports in turn."""
    folder = Path(tempfile.gettempdir()) / f"residuum-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    low, high = map(int, _EPHEMERAL.read_text().split())
    starts = range(_FIRST, _END - _BLOCK + 1, _BLOCK)
    outside = [start for start in starts if start + _BLOCK <= low or start > high]
    for start in outside or starts:
        file = (folder / str(start)).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        return file, itertools.cycle(range(start, start + _BLOCK))
    raise RuntimeError(f"Other test processes have locked all blocks of ports in {folder}.")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as services do, after connections of earlier ones
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True
