"""The ring: shared memory in which a worker writes extents and shippers read them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from residuum.wire.rows.shared_memory import SEAL_FUTURE_WRITE

EXTENT_ALIGNMENT: Final = 256
"""Bytes. Every extent begins at a multiple of this. Any element type is then aligned, two extents share no cache line,
and an extent of a single row wastes little."""


class Extent(NamedTuple):
    """A contiguous piece of a ring."""

    offset: int
    """Bytes from the ring's start, a multiple of EXTENT_ALIGNMENT."""
    nbytes: int
    """Its length in bytes, as it was requested."""


class SharedRing:
    """One piece of memory that processes share through a file descriptor.

    The worker creates the ring and writes to it. Shippers attach it read-only. Its size is a multiple of the page size,
    because CUDA pins whole pages.

    The memory is a memfd. It needs no cleanup: the kernel frees it when the last process that maps it ends, even if
    that process crashes. And it does not count towards /dev/shm, which a container limits to 64 MiB by default. The
    ring reserves all its memory at once, so that a machine with too little memory fails at startup and not during a
    step. The memfd is sealed, so no process can shrink it while another uses it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        """Wrap mapped memory; call `create` or `attach` instead."""
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        """The whole ring, uint8 [ring_bytes]."""

    @property
    def ring_bytes(self) -> int:
        """Bytes of the whole ring."""
        return self.memory.nbytes

    @classmethod
    def create(cls, ring_bytes: int) -> tuple[SharedRing, int]:
        """Create a ring.

        Args:
            ring_bytes: Its size, which is rounded up to whole pages.

        Returns:
            The ring, and a file descriptor for `attach` in other processes. The caller closes the descriptor.

        Raises:
            ValueError: The size is not positive.
            OSError: There is not enough memory.
        """
        if ring_bytes < 1:
            raise ValueError(f"a ring of {ring_bytes} bytes cannot be made; it needs at least 1")
        size = -(-ring_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _check_memory(size)
        descriptor = os.memfd_create("residuum-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            _seal(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(memory), descriptor

    @classmethod
    def attach(cls, descriptor: int, ring_bytes: int) -> SharedRing:
        """Map a ring of another process, read-only. The caller may close the descriptor afterwards.

        Raises:
            OSError: The descriptor is not a ring of that size.
            ValueError: The descriptor is not a ring of that size.
        """
        return cls(mmap.mmap(descriptor, ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ))

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return a view of an extent's bytes, uint8 [nbytes].

        Raises:
            IndexError: The extent is empty, or not within the ring.
        """
        end = extent.offset + extent.nbytes
        if not 0 <= extent.offset < end <= self.ring_bytes:
            raise IndexError(
                f"bytes {extent.offset} to {end} are no extent of this ring, which has {self.ring_bytes} bytes"
            )
        return self.memory[extent.offset : end]


def _seal(descriptor: int) -> None:
    """Fix the size, and keep other processes from mapping the memory for writing and from freeing pages of it."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    with contextlib.suppress(OSError):  # before Linux 5.1; stores then refuse to share the ring
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)


def _check_memory(size: int) -> None:
    """Refuse a ring larger than the available memory: Linux would allocate it and later kill some process."""
    with Path("/proc/meminfo").open() as lines:
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if size > available:
        raise OSError(
            errno.ENOMEM,
            f"a ring of {size:,} bytes does not fit the {available:,} bytes of memory that are available; choose a "
            "smaller --ring-mib",
        )
