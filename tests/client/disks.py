"""Disks on which there is no room."""

from __future__ import annotations

import contextlib
import resource


@contextlib.contextmanager
def no_file_above(size: int):
    """No file of this process may grow beyond so many bytes: writing on fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores the signal; the call fails instead
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
