"""A separate file system of a few MiB, to fill."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a small tmpfs at a new folder. Skips the test where that is not permitted."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % num_bytes):
        pytest.skip(
            f"mounting a small tmpfs is not permitted here ({os.strerror(ctypes.get_errno())}); "
            "tests/store/database/test_db.py also tests that an incomplete write loses nothing"
        )
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)  # MNT_DETACH: a failed test may have left a store running


def fill(path: Path) -> None:
    """Fill the file system with a file."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(64 << 10))
