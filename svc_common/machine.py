"""Which machine a process runs on."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def machine_id() -> str:
    """Return a text that is the same for all processes of this machine until it starts again. Containers share it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # a sandbox without it
        return platform.node()
