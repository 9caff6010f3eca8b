"""Simulates full disks."""

from __future__ import annotations

import contextlib
import resource


@contextlib.contextmanager
def no_file_above(size: int):
    """Limit the size of this process's files. Writing more fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores SIGXFSZ, so the call fails instead
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
