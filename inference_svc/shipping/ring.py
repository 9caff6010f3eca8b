"""The ring: slots of shared memory that a worker fills and its shippers read."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt


class SharedRing:
    """Slots of equal size in one piece of memory, shared by a file descriptor that has no name.

    The memory is a memfd: nobody has to remove it, because it ends with the last process that maps it, however that
    process ends; and /dev/shm, 64 MiB in a container by default, does not bound it. It is taken in full when the ring
    is made, so that a machine with too little memory shows at start, not in the middle of a step; and it is sealed, so
    that no process can shrink it under another.

    The worker makes the ring and writes; shippers attach it and can only read. Slots begin on pages, as pinning for
    the GPU wants it.
    """

    def __init__(self, memory: mmap.mmap, num_slots: int, slot_bytes: int, stride: int) -> None:
        """Wrap mapped memory; use `create` or `attach`."""
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.stride = stride
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        """The whole ring, uint8[num_slots * stride]: what is pinned for the GPU, once."""

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> tuple[SharedRing, int]:
        """Make a ring.

        Args:
            num_slots: How many slots.
            slot_bytes: Bytes that a slot holds at least.

        Returns:
            The ring, and a file descriptor that other processes attach it by. The caller closes it.

        Raises:
            ValueError: A size is not positive.
            OSError: There is not enough memory.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"a ring needs slots of some size, not {num_slots} of {slot_bytes} bytes")
        stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _check_memory(num_slots * stride)
        descriptor = os.memfd_create("residuum-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, num_slots * stride)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(descriptor, num_slots * stride, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(memory, num_slots, slot_bytes, stride), descriptor

    @classmethod
    def attach(cls, descriptor: int, num_slots: int, slot_bytes: int, stride: int) -> SharedRing:
        """Map a ring that another process made, for reading. The descriptor may be closed afterwards.

        Raises:
            OSError: The descriptor is not a ring of that size.
            ValueError: As above.
        """
        memory = mmap.mmap(descriptor, num_slots * stride, mmap.MAP_SHARED, mmap.PROT_READ)
        return cls(memory, num_slots, slot_bytes, stride)

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        """Return a slot, uint8[slot_bytes], where it lies.

        Raises:
            IndexError: There is no such slot.
        """
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot {index} is not one of the ring's {self.num_slots}")
        start = index * self.stride
        return self.memory[start : start + self.slot_bytes]


def _check_memory(size: int) -> None:
    """Refuse what the machine has no room for: taking it would not fail, it would have some process killed."""
    with Path("/proc/meminfo").open() as lines:
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if size > available:
        raise OSError(errno.ENOMEM, f"a ring of {size:,} bytes does not fit the {available:,} that are available")
