"""Reads the output of a job."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.extraction.folder import JOB, read_spec, shards_in
from residuum.extraction.inputs.packing import documents_of
from residuum.extraction.shards import map_all, read_prompts
from residuum.protocol.arguments import check_flag, short
from residuum.transport.progress import size

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class ExtractSummary:
    """What one run of a job did.

    Attributes:
        prompts: The prompts of this run, with those that failed.
        failed: How many of them failed.
        done_before: The prompts that were done before this run.
        tokens: The tokens of the prompts and replies.
        rows: The rows, counted once for all layers and sites.
        bytes: The bytes of the rows.
        seconds: How long it took.
        left_out: The broken documents that packing left out.
    """

    prompts: int
    failed: int
    done_before: int
    tokens: int
    rows: int
    bytes: int
    seconds: float
    left_out: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and replies per second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of rows for each token; 0 without tokens."""
        return self.bytes / self.tokens if self.tokens else 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Rows per second in GB (10⁹ bytes)."""
        return self.bytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        if not self.prompts:
            return f"all {self.done_before} prompts were done before"
        before = f" ({self.done_before} were done before)" if self.done_before else ""
        left_out = f", {self.left_out} documents left out" if self.left_out else ""
        return (
            f"{self.prompts} prompts{before}, {self.failed} failed{left_out}; {self.rows} rows, {size(self.bytes)} in "
            f"{self.seconds:.1f} s: {self.prompts / max(self.seconds, 1e-9):.1f} prompts/s, "
            f"{self.tokens_per_second:.0f} tokens/s, {self.bytes_per_token:.0f} bytes/token, "
            f"{size(self.gigabytes_per_second * 1e9)}/s"
        )


class LayerRows(Sequence[Array]):
    """The rows of one layer at one site: an array [rows, width] over all shards, mapped into memory.

    Index it with a number, a slice, an array of numbers or a boolean mask: only these rows are read, as a numpy array.
    `numpy.asarray` reads all of them. Many libraries do not know numpy's bfloat16; convert such rows first, as in
    `numpy.asarray(rows, numpy.float32)`.
    """

    def __init__(
        self, parts: Sequence[Array], width: int, dtype: np.dtype[Any], source: tuple[Extracted, str] | None = None
    ) -> None:
        """Use `Extracted.layer` instead. `source` is the extraction, and the name of the point."""
        if any(part.dtype != dtype or part.shape[1:] != (width,) for part in parts):
            raise ValueError(f"all parts must have rows of {width} × {dtype.name}")
        self.shards = tuple(parts)
        """The rows of each shard, mapped into memory."""
        self._source = source
        self.dtype = dtype
        """The element type."""
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self.shape = (int(self._ends[-1]) if len(parts) else 0, width)
        """[rows, width]."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (int, np.integer)):
            return self._rows(np.array([index]))[0]
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._span(start, stop) if step == 1 else self._rows(np.arange(start, stop, step))
        return self._rows(self._numbers(index))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: FBT001 - numpy's protocol
        rows = self._span(0, len(self))
        return np.array(rows, dtype=dtype) if copy else rows.astype(dtype or rows.dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle where the rows are: pickle would copy all of them out of the mapped files."""
        if self._source is None:
            return LayerRows, (self.shards, self.shape[1], self.dtype)
        return Extracted.at, self._source

    def __repr__(self) -> str:
        return f"LayerRows({self.shape[0]} × {self.shape[1]}, {self.dtype.name}, {len(self.shards)} shards)"

    def _numbers(self, index: Any) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows that a mask or an array of numbers chooses."""
        numbers = np.asarray(index)
        if numbers.dtype == np.bool_:
            if numbers.shape != (len(self),):
                raise IndexError(
                    f"The mask has shape {numbers.shape}, but there are {len(self)} rows. It needs one value for each "
                    "row, not for each prompt: prompt_mask[rows.prompt] makes one from the other."
                )
            return np.flatnonzero(numbers)
        are_integers = numbers.dtype.kind in "iu" or numbers.size == 0  # an empty list makes an array of floats
        if isinstance(index, tuple) or numbers.ndim != 1 or not are_integers:
            raise IndexError(
                f"Rows are chosen with a number, a slice, an array of integers [n] or a mask [{len(self)}], not with "
                f"{short(index)}. To choose elements of rows, index the result again."
            )
        return numbers.astype(np.int64)

    def _span(self, start: int, stop: int) -> Array:
        """Return consecutive rows: a view if they are in one shard."""
        parts, first = [], 0
        for part, end in zip(self.shards, self._ends.tolist(), strict=True):
            if start < end and stop > first:
                parts.append(part[max(start - first, 0) : stop - first])
            first = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self.shape[1]), self.dtype)

    def _rows(self, numbers: npt.NDArray[np.int64]) -> Array:
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        if ((numbers < 0) | (numbers >= len(self))).any():
            raise IndexError(f"There are only {len(self)} rows.")
        rows = np.empty((len(numbers), self.shape[1]), self.dtype)
        shards = np.searchsorted(self._ends, numbers, side="right")
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            rows[chosen] = self.shards[shard][numbers[chosen] - (self._ends[shard] - len(self.shards[shard]))]
        return rows


class Extracted:
    """The rows that `client.extract` or `residuum extract` has written. It needs no service.

    All arrays have the same order: that of the prompts, and then of the positions. The files are mapped into memory, so
    the rows may be larger than memory.

    Args:
        folder: The job's folder. If the job is not complete, the rows of its shards so far are read.

    Attributes:
        folder: The job's folder.
        spec: What the job did: the `spec` of its job.json.
        is_complete: Whether the job has all its prompts.
        summary: What this run did; None if the folder was only opened.

    Raises:
        FileNotFoundError: There is no job in the folder.
        InvalidRequest: A file is missing or damaged, or has rows of another dtype or width than those before it.
        OSError: A file cannot be read, or there are more files than the system allows to be open.

    Example:
        >>> rows = residuum.Extracted("train-rows")
        >>> rows.layer(12).shape, rows.labels("y")[:3]
        ((2000, 576), [1, 0, 0])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not (self.folder / JOB).is_file():
            raise FileNotFoundError(f"There is no job in {self.folder}: it has no {JOB}. Name the folder of a job.")
        self.spec: Mapping[str, Any] = read_spec(self.folder)
        self.summary: ExtractSummary | None = None
        self._shards = list(shards_in(self.folder))
        self.is_complete = sum(shard.prompts for shard in self._shards) == self.spec["prompts"]
        self._arrays = map_all([self.folder / shard.rows_file for shard in self._shards])
        self._tensors = {name: kind for shard in self._shards for name, kind in shard.tensors.items()}

    @property
    def num_shards(self) -> int:
        """The number of shards that `shard` returns."""
        return len(self._shards)

    def shard(self, number: int) -> Extracted:
        """Return the rows of one shard. `prompt` still counts over the whole job.

        A job may be larger than memory, and so may be the token IDs, labels and positions of all its rows. Those of a
        shard are small.
        """
        part = object.__new__(Extracted)
        part.__dict__ |= {name: value for name, value in vars(self).items() if name not in _CACHED}
        part.__dict__ |= {"_shards": [self._shards[number]], "_arrays": [self._arrays[number]]}
        return part

    def __getstate__(self) -> dict[str, Any]:
        """Leave the rows and columns out of a pickle: another process maps the files itself."""
        kept = {name: value for name, value in vars(self).items() if name not in {*_CACHED, "_arrays"}}
        return {**kept, "folder": self.folder.absolute()}  # the other process may run in another folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the files."""
        self.__dict__ |= state
        self._arrays = map_all([self.folder / shard.rows_file for shard in self._shards])

    @property
    def points(self) -> tuple[str, ...]:
        """The points, such as "resid_post.12": a site and a layer for each tensor of rows."""
        return tuple(sorted(self._tensors, key=lambda name: (name.split(".")[0], int(name.split(".")[1]))))

    def layer(self, layer: int, site: str = "resid_post") -> LayerRows:
        """Return the rows of a layer at a site, [rows, width].

        Raises:
            KeyError: The job has no such rows; the message lists those that it has.
        """
        return self.at(f"{site}.{layer}")

    def at(self, name: str) -> LayerRows:
        """Return the rows of a point, such as "resid_post.12", [rows, width].

        Raises:
            KeyError: The job has no such rows; the message lists those that it has.
        """
        if name not in self._tensors:
            raise KeyError(f"there are no rows of {name}; choose among {', '.join(self.points)}")
        dtype, width = self._tensors[name]
        kind = np.dtype(dtype)  # ml_dtypes makes bfloat16 known to numpy
        empty = np.empty((0, width), kind)
        return LayerRows([arrays.get(name, empty) for arrays in self._arrays], width, kind, (self, name))

    @cached_property
    def prompts(self) -> tuple[Mapping[str, Any], ...]:
        """The job's prompts: `index`, `input_row`, `labels`, `rows`, `tokens`, and `failed` for those without rows.

        Raises:
            InvalidRequest: A file of prompts is damaged.
        """
        return tuple(line for shard in self._shards for line in read_prompts(self.folder, shard))

    @property
    def failures(self) -> tuple[Mapping[str, Any], ...]:
        """The prompts that failed, each with a `reason` and a `message` in `failed`.

        With `pack`, also the documents that were left out; these have only `input_row` and `failed`.
        """
        return tuple(
            failure
            for line in self.prompts
            for failure in (*line.get("left_out", ()), *([line] if "failed" in line else []))
        )

    @cached_property
    def prompt(self) -> npt.NDArray[np.int64]:
        """The prompt of each row, as an index into `prompts`; int64 [rows]."""
        return self._column("prompt")

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each row, counted over prompt and reply; int64 [rows]."""
        return self._column("positions")

    @cached_property
    def sequences(self) -> npt.NDArray[np.int64]:
        """The sequence of each row; int64 [rows]. It is 0 unless n > 1."""
        return self._column("sequences")

    @cached_property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The token ID at each row's position, -1 if unknown; int64 [rows]."""
        return self._column("token_ids")

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the job and of its token IDs, as 16 hexadecimal digits. Other data have another one."""
        digest = hashlib.sha256(json.dumps(self.spec, sort_keys=True).encode())
        for arrays in self._arrays:  # one at a time: the columns of all shards may be larger than memory
            for name in ("token_ids", "offsets"):
                digest.update(b"%d %d " % (len(arrays[name]), zlib.crc32(arrays[name].data)))
        return digest.hexdigest()[:16]

    def check_complete(self, *, allow_partial: bool) -> None:
        """Check that the job has all its prompts.

        Args:
            allow_partial: Accept a job that is not complete.

        Raises:
            InvalidRequest: It is not complete.
            TypeError: `allow_partial` is not a bool.
        """
        if not check_flag("allow_partial", allow_partial) and not self.is_complete:
            raise InvalidRequest(
                f"The job in {self.folder} is not complete. Run it again to finish it, or give allow_partial=True.",
                reason="INVALID_FIELD",
            )

    def export(
        self,
        folder: str | os.PathLike[str],
        format: Literal["datasets", "parquet", "zarr", "tar"] = "datasets",  # noqa: A002
        *,
        allow_partial: bool = False,
    ) -> Path:
        """Write all rows for other libraries, with token IDs, prompts, positions, documents and labels.

        If the job was packed, the table has one row for each window: a column [context, width] for each point, named as
        in TransformerLens, and `token_ids` [context]. This is what SAELens reads as cached activations. Otherwise, and
        if windows have replies of different lengths, the table has one row for each token. bfloat16 becomes float32.

        Args:
            folder: The folder to write; it must not exist.
            format: "datasets" for `datasets.load_from_disk`, or "parquet" for Parquet files; both need the extra
                `parquet`. "zarr" for a Zarr group with an array [rows, width] for each point; it needs the extra
                `zarr`. "tar" for tar files in the layout of WebDataset, with a sample of .npy files for each prompt.
            allow_partial: Export the rows so far of a job that is not complete.

        Returns:
            The folder.

        Raises:
            FileExistsError: The folder exists.
            InvalidRequest: The job is not complete, there are no rows, or a kept column has the name of another column.
            ImportError: pyarrow is not installed.

        Example:
            >>> datasets.load_from_disk(rows.export("cached"))[0]["blocks.12.hook_resid_post"]
        """
        from residuum.extraction.results.exporting import export_rows

        return export_rows(self, folder, format, allow_partial=allow_partial)

    def labels(self, name: str) -> list[Any]:
        """Return a kept column's value for each row.

        Kept columns are not labels of the captures, by which the store can filter; `Capture.labels` sets these.

        Raises:
            KeyError: The job did not keep this column; the message lists those that it kept.

        Example:
            >>> values = np.asarray(rows.layer(12), np.float32)
            >>> probe = LogisticRegression().fit(values, rows.labels("y"))
        """
        found = self.document_labels(name)
        return [found[index] for index in self._document_numbers.tolist()]

    def document_labels(self, name: str) -> list[Any]:
        """Return a kept column's value for each prompt, or with `pack` for each document of each window.

        Raises:
            KeyError: As for `labels`.
        """
        if name not in self.spec["keep"]:
            kept = ", ".join(self.spec["keep"]) or "none: name columns with keep= when you extract"
            raise KeyError(f"the job did not keep the column {name!r}; it kept {kept}")
        return [document["labels"].get(name) for documents in self._documents for document in documents]

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """The row of the input that each row is from; int64 [rows]. Packed windows have rows of several.

        The separator before a document counts as its part.
        """
        rows = np.array([item["input_row"] for documents in self._documents for item in documents], np.int64)
        return rows[self._document_numbers]

    @cached_property
    def _documents(self) -> list[list[Mapping[str, Any]]]:
        return documents_of(self.prompts)

    @cached_property
    def _document_numbers(self) -> npt.NDArray[np.int64]:
        """The document of each row, as an index of the documents of all prompts in order."""
        counts = [len(documents) for documents in self._documents]
        prompts = np.repeat(np.arange(len(counts)), counts)
        at = np.array([item["position"] for documents in self._documents for item in documents], np.int64)
        # So that one number orders documents by prompt and position. A document may begin after the last row.
        span = int(max(self.positions.max(initial=0), at.max(initial=0))) + 1
        prompt = self.prompt - (self._shards[0].first_prompt if self._shards else 0)
        return np.searchsorted(prompts * span + at, prompt * span + self.positions, side="right") - 1

    def __len__(self) -> int:
        return sum(shard.rows for shard in self._shards)

    def __repr__(self) -> str:
        state = "complete" if self.is_complete else "not complete"
        return f"Extracted({str(self.folder)!r}, {state}: {len(self)} rows of {len(self._tensors)} points)"

    def _column(self, name: str) -> npt.NDArray[np.int64]:
        parts = [arrays[name] for arrays in self._arrays]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


_CACHED = tuple(name for name, value in vars(Extracted).items() if isinstance(value, cached_property))
