"""The place that an export goes to: it has all of it in the end, or is as it was before."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER_MARK = "zarr.json"
"""By this file a folder is known as an export, which another may take the place of."""


@dataclass(frozen=True)
class Workplace:
    """Where an export is made, on the disk that it goes to."""

    scratch: Path
    """A folder for whatever is needed meanwhile."""
    result: Path
    """Where the file or folder is to be written."""


def check_free(path: Path, *, overwrite: bool) -> None:
    """Check that something may be written in this place.

    Raises:
        FileExistsError: Something is there, and may not be replaced.
        FileNotFoundError: There is no such folder.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}.")
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(f"{path} is there already; name another file, or replace it with overwrite=True.")
    if path.exists() and not path.is_dir() and not path.is_file():
        raise FileExistsError(f"{path} is a device or a pipe, in whose place no file is put; name a file.")
    if path.is_dir() and not (path / FOLDER_MARK).is_file():
        raise FileExistsError(f"{path} is a folder, and not one that was exported: it is not replaced. Name another.")


@contextlib.contextmanager
def workplace(path: Path, *, overwrite: bool) -> Iterator[Workplace]:
    """Make a place to work in; when the block has ended well, what it made stands at `path`, else nothing does.

    What it takes the place of keeps its permissions, and is there until then.

    Raises:
        FileExistsError: Something is there, and may not be replaced.
        OSError: It cannot be written there.
    """
    check_free(path, overwrite=overwrite)
    try:
        made = tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    folder = Path(made)
    try:
        place = Workplace(folder, folder / "result")
        yield place
        check_free(path, overwrite=overwrite)  # somebody else may have written meanwhile
        _move(place.result, path, aside=folder / "replaced")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(result: Path, path: Path, *, aside: Path) -> None:
    if path.is_file() and not path.is_symlink():
        result.chmod(stat.S_IMODE(path.stat().st_mode))
    if path.is_dir() or result.is_dir():
        if path.exists():
            path.rename(aside)
        result.rename(path)
    else:
        result.replace(path)
