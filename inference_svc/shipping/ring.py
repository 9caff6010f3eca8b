"""The ring: shared memory in which a worker fills extents, and its shippers read them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

EXTENT_ALIGNMENT: Final = 256
"""Bytes. Every extent begins at a multiple: any element type is aligned, no cache line is shared by two extents, and
a single row wastes little."""


class Extent(NamedTuple):
    """A run of a ring's bytes."""

    offset: int
    """Bytes from the ring's start, a multiple of EXTENT_ALIGNMENT."""
    nbytes: int
    """Its length: what was asked for, in bytes."""


class SharedRing:
    """One piece of memory, shared by a file descriptor that has no name.

    The memory is a memfd: nobody has to remove it, because it ends with the last process that maps it, however that
    process ends; and /dev/shm, 64 MiB in a container by default, does not bound it. It is taken in full when the ring
    is made, so that a machine with too little memory shows at start, not in the middle of a step; and it is sealed, so
    that no process can shrink it under another.

    The worker makes the ring and writes; shippers attach it and can only read. It is whole pages, as pinning for the
    GPU wants it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        """Wrap mapped memory; use `create` or `attach`."""
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        """The whole ring, uint8[ring_bytes]: what is pinned for the GPU, once."""

    @property
    def ring_bytes(self) -> int:
        """Bytes of the whole ring."""
        return self.memory.nbytes

    @classmethod
    def create(cls, ring_bytes: int) -> tuple[SharedRing, int]:
        """Make a ring.

        Args:
            ring_bytes: Its bytes at least; they are rounded up to whole pages.

        Returns:
            The ring, and a file descriptor that other processes attach it by. The caller closes it.

        Raises:
            ValueError: The size is not positive.
            OSError: There is not enough memory.
        """
        if ring_bytes < 1:
            raise ValueError(f"a ring needs some bytes, not {ring_bytes}")
        size = -(-ring_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _check_memory(size)
        descriptor = os.memfd_create("residuum-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(memory), descriptor

    @classmethod
    def attach(cls, descriptor: int, ring_bytes: int) -> SharedRing:
        """Map a ring that another process made, for reading. The descriptor may be closed afterwards.

        Raises:
            OSError: The descriptor is not a ring of that size.
            ValueError: As above.
        """
        return cls(mmap.mmap(descriptor, ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ))

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return an extent, uint8[nbytes], where it lies.

        Raises:
            IndexError: It is empty, or not within the ring.
        """
        end = extent.offset + extent.nbytes
        if not 0 <= extent.offset < end <= self.ring_bytes:
            raise IndexError(f"bytes {extent.offset} to {end} are not an extent of the ring's {self.ring_bytes}")
        return self.memory[extent.offset : end]


def _check_memory(size: int) -> None:
    """Refuse what the machine has no room for: taking it would not fail, it would have some process killed."""
    with Path("/proc/meminfo").open() as lines:
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if size > available:
        raise OSError(errno.ENOMEM, f"a ring of {size:,} bytes does not fit the {available:,} that are available")
