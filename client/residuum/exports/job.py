"""One export, from its arguments to its result. Both clients use this."""

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
    from residuum.values.captures.activations import Activations
    from residuum.values.captures.manifest import Manifest


@dataclass(frozen=True)
class Export:
    """The result of an export.

    Attributes:
        path: The file; for Zarr, the folder.
        format: "safetensors", "npz", "zarr" or "parquet".
        manifest: The capture's manifest: what was captured, what is missing, and why.
        layers: The exported layers.
        sites: The exported sites.
        sequences: The exported sequences.
        num_positions: Number of positions of the first sequence.
        num_rows: Exported rows, counted once for each sequence, site and layer.
        num_missing: Missing rows at these positions: 0 unless partial captures were allowed.
        num_bytes: Bytes of the file, or of the folder's files.
    """

    path: Path
    format: str
    manifest: Manifest
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    sequences: tuple[int, ...]
    num_positions: int
    num_rows: int
    num_missing: int
    num_bytes: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a row at the sites, each number once."""
        return tuple(dict.fromkeys(self.manifest.format_at(site).decoded_width for site in self.sites))

    def __str__(self) -> str:
        manifest = self.manifest
        more = f", {len(self.sequences)} sequences" if len(self.sequences) > 1 else ""
        more += f", sites {', '.join(self.sites)}" if self.sites != ("resid_post",) else ""
        more += ", before steering" if manifest.before_steering else ""
        more += f", {self.num_missing} rows missing ({manifest.describe_missing()})" if self.num_missing else ""
        widths = " or ".join(map(str, self.widths))
        shape = f"{len(self.layers)} layers × {self.num_positions} positions × {widths}"
        return f"{manifest.capture_id} as {self.format}, {manifest.state}: {shape}{more}"


class StoppedError(Exception):
    """The export was stopped before it was complete."""


class ExportJob:
    """An export. Creating it checks all arguments that can be checked before the capture is read."""

    def __init__(
        self, path: str | os.PathLike[str], format_name: str | None, *, overwrite: bool, progress: bool
    ) -> None:
        """Check the arguments.

        Raises:
            InvalidRequest: The format does not exist.
            ImportError: The format's package is not installed.
            FileExistsError: The path exists and may not be replaced.
            FileNotFoundError: The path's folder does not exist.
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
        """Yield a workplace. If the block succeeds, the result that `write` made in it is moved to the path."""
        with workplace(self.path, overwrite=self._overwrite) as place:
            yield place, Scratch(place.scratch)

    def run(self, acts: Activations, place: Workplace, touch: Callable[[int], None]) -> Export:
        """Run `write` in a thread, because KeyboardInterrupt reaches only the main one. An interrupt stops the thread.

        Without this, zarr's threads would still be writing while the workplace is removed.
        """
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(self.write, acts, place, touch)
            try:
                return writing.result()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Make `write` raise StoppedError after its current slice."""
        self._stopped.set()

    def write(self, acts: Activations, place: Workplace, touch: Callable[[int], None]) -> Export:
        """Write activations into the workplace.

        Args:
            acts: The activations.
            place: The workplace.
            touch: Called with the number of bytes of rows that were read.

        Raises:
            OSError: The export cannot be written, such as on a full disk.
            StoppedError: `stop` was called.
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
            layers=tuple(sorted({layer for view in views for layer in view.layers})),
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
    """Export activations that are in memory; see `Activations.export`."""
    job = ExportJob(path, format_name, overwrite=overwrite, progress=False)
    with job.begin() as (place, _):
        return job.run(acts, place, _ignore)


def _sync(path: Path) -> None:
    """Sync a file before it is renamed: otherwise a power failure may leave an empty file under the final name."""
    if path.is_file():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return sum(item.stat().st_size for item in files)


def _ignore(count: int) -> None:
    """Do nothing; rows in memory need no accounting."""
