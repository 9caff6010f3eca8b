"""One export: what is asked for, where it goes, and what came of it. Both clients use it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from residuum.exports.formats import Format, Write, format_of
from residuum.exports.scratch import Scratch
from residuum.exports.target import Workplace, check_free, workplace
from residuum.transport.progress import progress_bar

if TYPE_CHECKING:
    from residuum.values.activations import Activations
    from residuum.values.manifest import Manifest


@dataclass(frozen=True)
class Export:
    """What was exported."""

    path: Path
    """The file; for Zarr the folder."""
    format: str
    """"safetensors", "npz", "zarr" or "parquet"."""
    manifest: Manifest
    """What was captured, and whether all of it is there."""
    layers: tuple[int, ...]
    """The layers that were exported."""
    sites: tuple[str, ...]
    """The sites that were exported."""
    sequences: tuple[int, ...]
    """The sequences that were exported."""
    num_positions: int
    """The positions of the first sequence."""
    num_rows: int
    """Rows, counted once for each sequence, site and layer."""
    num_missing: int
    """Rows of these positions that are missing: none unless partial rows were allowed."""
    num_bytes: int
    """Bytes of the file, or of the folder's files."""

    def __str__(self) -> str:
        what = self.manifest
        more = f", {len(self.sequences)} sequences" if len(self.sequences) > 1 else ""
        more += f", sites {', '.join(self.sites)}" if self.sites != ("resid_post",) else ""
        more += ", before steering" if what.before_steering else ""
        more += f", {self.num_missing} rows missing ({what.describe_missing()})" if self.num_missing else ""
        shape = f"{len(self.layers)} layers × {self.num_positions} positions × {what.width}"
        return f"{what.capture_id} as {self.format}, {what.state}: {shape}{more}"


class StoppedError(Exception):
    """The export was told to stop."""


class ExportJob:
    """An export that has not been made. Everything that can be refused by itself is refused here."""

    def __init__(
        self, path: str | os.PathLike[str], format_name: str | None, *, overwrite: bool, progress: bool
    ) -> None:
        """Check what is asked for.

        Raises:
            InvalidRequest: There is no such format.
            ImportError: The format's package is not installed.
            FileExistsError: Something is there, and may not be replaced.
            FileNotFoundError: There is no such folder.
        """
        self.path = Path(path)
        self._format: Format = format_of(self.path, format_name)
        self._write: Write = self._format.writer()
        self._overwrite = overwrite
        self._progress = progress
        self._stopped = threading.Event()
        check_free(self.path, overwrite=overwrite)

    @contextlib.contextmanager
    def begin(self) -> Iterator[tuple[Workplace, Scratch]]:
        """Make a place to work in; what `write` made in it stands at the path when the block has ended well."""
        with workplace(self.path, overwrite=self._overwrite) as place:
            yield place, Scratch(place.scratch)

    def run(self, acts: Activations, place: Workplace, touch: Callable[[int], None]) -> Export:
        """Do `write` in a thread, which no interrupt reaches; an interrupt of this one stops it, and waits for that.

        Otherwise zarr's own threads would still be writing when the place to work in is removed.
        """
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(self.write, acts, place, touch)
            try:
                return writing.result()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Have `write` end with the slice that it is at, by a StoppedError."""
        self._stopped.set()

    def write(self, acts: Activations, place: Workplace, touch: Callable[[int], None]) -> Export:
        """Write activations into the place to work in.

        Args:
            acts: The activations.
            place: Where to write.
            touch: Is told of the bytes of rows that were read.

        Raises:
            OSError: It cannot be written, as when the disk is full.
        """
        label = f"writing {self.path.name}"
        with progress_bar(label, acts.nbytes, enabled=self._progress, of_bytes=True) as advance:

            def written(count: int) -> None:
                if self._stopped.is_set():
                    raise StoppedError
                advance(count)
                touch(count)

            try:
                self._write(acts, place.result, written)
                _sync(place.result)
            except OSError as error:
                raise OSError(f"{self.path} cannot be written: {error}") from None
        views = [acts.select(sequence=sequence, site=site) for sequence in acts.sequences for site in acts.sites]
        return Export(
            path=self.path,
            format=self._format.name,
            manifest=acts.manifest,
            layers=acts.layers,
            sites=acts.sites,
            sequences=acts.sequences,
            num_positions=len(views[0].positions),
            num_rows=sum(int(view.present.sum()) for view in views),
            num_missing=sum(int((~view.present).sum()) for view in views),
            num_bytes=_size(place.result),
        )


def export_activations(
    acts: Activations, path: str | os.PathLike[str], format_name: str | None, *, overwrite: bool
) -> Export:
    """Write activations that are in memory; see `Activations.export`."""
    job = ExportJob(path, format_name, overwrite=overwrite, progress=False)
    with job.begin() as (place, _):
        return job.run(acts, place, _ignore)


def _sync(path: Path) -> None:
    """Have a file's bytes on the disk before its name is: else a loss of power may leave a name for nothing."""
    if path.is_file():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return sum(item.stat().st_size for item in files)


def _ignore(count: int) -> None:
    """Take note of nothing."""
