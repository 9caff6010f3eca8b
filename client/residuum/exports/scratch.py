"""Arrays in files: what does not fit memory lies on the disk that the export goes to, too."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_RESIDENT_BYTES = 32 << 20
"""How much of the arrays may be in this process's memory before it is let go."""


class Scratch:
    """Makes arrays that lie in files of a folder, and keeps what of them is in memory below a bound.

    The files have no room of their own in memory: the kernel writes them out as it sees fit. Still every page that was
    touched counts as this process's, and containers are ended by that count; so it is let go of from time to time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: list[mmap.mmap] = []
        self._touched = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Make an array of undefined elements.

        Raises:
            OSError: There is no room on the disk. Later there will be: it is reserved here.
        """
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        try:
            with (self._folder / f"rows{len(self._maps)}").open("w+b") as file:
                _reserve(file.fileno(), size)
                self._maps.append(mmap.mmap(file.fileno(), size))
        except OSError as error:
            raise OSError(f"There is no room for {size} bytes of rows in {self._folder.parent}: {error}") from None
        return np.frombuffer(self._maps[-1], dtype=dtype).reshape(shape)

    def touch(self, count: int) -> None:
        """Say that so many bytes of the arrays were read or written."""
        self._touched += count
        if self._touched >= _RESIDENT_BYTES:
            self._touched = 0
            self.let_go()

    def let_go(self) -> None:
        """Give back the memory that the arrays take at the moment. They keep what they hold: it is in their files."""
        for area in self._maps:
            with contextlib.suppress(AttributeError):  # not on every system; then the kernel does it when it must
                area.madvise(mmap.MADV_DONTNEED)


def _reserve(descriptor: int, size: int) -> None:
    """Give a file its size, and the room for it: a mapped file that finds none later ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)
