"""The target of an export. An export replaces it completely, or leaves it unchanged."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from residuum.protocol.arguments import check_flag

FOLDER_MARK = "zarr.json"
"""The file that marks a folder as an export, which another export may replace."""


@dataclass(frozen=True)
class Workplace:
    """A temporary folder for an export, on the disk of its target."""

    scratch: Path
    """A folder for temporary files."""
    result: Path
    """Where the exported file or folder is written first."""


def is_export(path: Path) -> bool:
    """Return whether a path is a file, or an export in a folder. An unfinished export has another name."""
    return path.is_file() or (path / FOLDER_MARK).is_file()


def check_free(path: Path, *, overwrite: bool) -> None:
    """Check that an export may be written to a path.

    Raises:
        FileExistsError: The path exists and may not be replaced.
        FileNotFoundError: The path's folder does not exist.
        TypeError: `overwrite` is not a bool.
    """
    check_flag("overwrite", overwrite)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: the folder {path.parent} does not exist. Create it first.")
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(f"{path} already exists. Choose another path, or replace it with overwrite=True.")
    if path.exists() and not path.is_dir() and not path.is_file():
        raise FileExistsError(f"{path} is a device or a pipe, and an export does not replace these. Choose a file.")
    if path.is_dir() and not is_export(path):
        message = f"{path} is a folder, but not an export, so it is not replaced. Choose another path."
        raise FileExistsError(message)


@contextlib.contextmanager
def workplace(path: Path, *, overwrite: bool) -> Iterator[Workplace]:
    """Yield a workplace, and move its result to `path` if the block succeeds. Otherwise `path` is left unchanged.

    A replaced file stays in place until the move, and the new file gets its permissions.

    Raises:
        FileExistsError: The path exists and may not be replaced.
        OSError: The path cannot be written.
    """
    check_free(path, overwrite=overwrite)
    try:
        made = tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    folder = Path(made)
    aside = folder / "replaced"
    try:
        place = Workplace(folder, folder / "result")
        yield place
        check_free(path, overwrite=overwrite)  # check again: another process may have written meanwhile
        _move(place.result, path, aside=aside)
    finally:
        if os.path.lexists(aside) and not os.path.lexists(path):  # the move stopped half-way
            aside.rename(path)
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
