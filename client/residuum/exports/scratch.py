"""File-backed arrays, on the disk of the export, for rows that do not fit into memory."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_RESIDENT_BYTES = 32 << 20
"""Bytes of the arrays that may be resident before their pages are released."""


class Scratch:
    """Allocates arrays in files of a folder, and bounds how much of them is resident in memory.

    The kernel can write mapped pages to the files at any time. But every touched page counts towards this process's
    memory, and containers are killed by that count. So this class releases the pages regularly.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: list[mmap.mmap] = []
        self._touched = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a new array with undefined elements. Its disk space is reserved now, so writing to it cannot fail.

        Raises:
            OSError: The disk has no room.
        """
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        try:
            with (self._folder / f"rows{len(self._maps)}").open("w+b") as file:
                _reserve(file.fileno(), size)
                self._maps.append(mmap.mmap(file.fileno(), size))
        except OSError as error:
            raise OSError(f"Cannot reserve {size} bytes for rows in {self._folder.parent}: {error}") from None
        return np.frombuffer(self._maps[-1], dtype=dtype).reshape(shape)

    def touch(self, count: int) -> None:
        """Count bytes of the arrays that were read or written, and release memory at the limit."""
        self._touched += count
        if self._touched >= _RESIDENT_BYTES:
            self._touched = 0
            self.release()

    def release(self) -> None:
        """Release the memory of the arrays. Their contents remain in the files."""
        for area in self._maps:
            with contextlib.suppress(AttributeError):  # madvise is missing on some systems
                area.madvise(mmap.MADV_DONTNEED)


def _reserve(descriptor: int, size: int) -> None:
    """Set a file's size and reserve its disk space. Writing to a mapped file without space would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)
