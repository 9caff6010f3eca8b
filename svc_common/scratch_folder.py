"""The temporary folders of services. A service that was killed leaves its folder, and a later one removes it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "residuum-"
"""How the names of these folders begin. Other programs' folders may begin with it, too: they have no lock."""

_LOCK = "owner.lock"
_NEW_SECONDS = 5.0
"""The time for which a folder that has changed counts as in use: its owner may not have locked it yet."""


def own_folder(folder: str) -> None:
    """Lock a folder for this process. The kernel drops the lock when the process has ended, even if it is killed."""
    descriptor = os.open(Path(folder, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)  # it stays open
    with suppress(OSError):  # a file system without locks: nobody can take the lock, so the folder stays
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_abandoned_folders() -> None:
    """Remove the folders of this user's services that have ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has no lock, its owner lives, or another service is removing it
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    status = folder.lstat()
    is_old = time.time() - status.st_mtime > _NEW_SECONDS
    if not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and is_old):
        return
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)
