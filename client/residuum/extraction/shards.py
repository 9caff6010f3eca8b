"""Shards: files with the rows of consecutive prompts, and one line of JSON for each prompt."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.exports.writers.safetensors import DTYPES, header
from residuum.extraction.inputs.prompts import Item
from residuum.values.captures.activations import Activations
from residuum.values.replies.generation import Reply

FORMAT = "residuum.extract.v1"
"""The value of "format" in the files of a job."""

SHARD_PROMPTS = 4096
"""The most prompts in a shard. So a job with small rows also writes shards from time to time."""

_OTHER_FILES = 256
"""Open files that a process may need beside those of rows."""

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_INDEX_ARRAYS = ("offsets", "positions", "prompt", "sequences", "token_ids")
"""The arrays that describe the rows. All others are rows."""

Array = npt.NDArray[Any]

Kinds = Mapping[str, tuple[str, int]]
"""The element type and width of each tensor of rows."""


@dataclass(frozen=True)
class ShardInfo:
    """A shard that is on the disk."""

    number: int
    """Its number, from 0."""
    first_prompt: int
    """The place of its first prompt in the job."""
    prompts: int
    """The number of its prompts, with those that failed."""
    failed: int
    """How many of them failed."""
    rows: int
    """The number of its rows, in each tensor."""
    tokens: int
    """The tokens of its prompts and replies."""
    bytes: int
    """The bytes of its rows."""
    tensors: Mapping[str, tuple[str, int]]
    """The element type and width of each tensor of rows."""

    @property
    def rows_file(self) -> str:
        """The name of the file with the rows."""
        return f"rows-{self.number:05}.safetensors"

    @property
    def prompts_file(self) -> str:
        """The name of the file with the prompts."""
        return f"prompts-{self.number:05}.jsonl"


class Shard:
    """Collects the rows of consecutive prompts in memory. It copies no rows."""

    def __init__(self, number: int, first_prompt: int, *, as_float32: bool, kinds: Kinds | None = None) -> None:
        """Create a shard without prompts.

        Args:
            number: Its number.
            first_prompt: The place of its first prompt in the job.
            as_float32: Whether all rows become float32.
            kinds: The element type and width of the tensors in the shards before it. Its own must be the same.
        """
        self.number = number
        self.first_prompt = first_prompt
        self.bytes = 0
        self._dtype = np.dtype(np.float32) if as_float32 else None
        self.kinds: dict[str, tuple[str, int]] = dict(kinds or {})
        """The element type and width of the tensors of rows, also of those in the shards before it."""
        self._rows: dict[str, list[Array]] = {}
        self._columns: dict[str, list[Array]] = {"positions": [], "sequences": [], "token_ids": []}
        self._offsets = [0]
        self._lines: list[dict[str, Any]] = []
        self._failed = self._tokens = 0

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return len(self._lines)

    @property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """What the prompts file has of each prompt."""
        return self._lines

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of the file of rows, by name."""
        arrays: dict[str, Array] = {}
        for name in (*_INDEX_ARRAYS, *sorted(self._rows)):
            dtype, shape, parts = self._tensor(name)
            arrays[name] = np.concatenate(parts, dtype=dtype) if parts else np.empty(shape, dtype)
        return arrays

    def add(self, item: Item, acts: Activations, reply: Reply) -> None:
        """Add the rows of a prompt.

        Raises:
            InvalidRequest: Its rows have another shape or element type than those of the prompts before it.
        """
        count = 0
        for sequence in acts.sequences:
            parts = [acts.select(sequence=sequence, site=site) for site in acts.sites]
            positions = parts[0].positions
            for part in parts:
                for layer in part.layers:
                    self._add_rows(f"{part.site}.{layer}", part.raw(layer), len(positions), item)
            self._columns["positions"].append(positions)
            self._columns["sequences"].append(np.full(len(positions), sequence, np.int64))
            self._columns["token_ids"].append(parts[0].token_ids)
            count += len(positions)
        tokens = len(reply.prompt_token_ids) + reply.usage.generated_tokens
        self._tokens += tokens
        line = self._line(item, count)
        line["tokens"] = tokens
        if reply.usage.generated_tokens:
            texts = [sequence.text for sequence in reply.sequences]
            line["reply"] = texts[0] if len(texts) == 1 else texts
        self._lines.append(line)

    def add_failure(self, item: Item, reason: str, message: str) -> None:
        """Add a prompt that has no rows."""
        self._failed += 1
        self._lines.append({**self._line(item, 0), "failed": {"reason": reason, "message": message}})

    def write(self, rows: Path, prompts: Path) -> ShardInfo:
        """Write both files.

        Raises:
            OSError: They cannot be written.
        """
        with prompts.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_without_nan(line), allow_nan=False, default=str) + "\n" for line in self._lines)
        info = ShardInfo(
            self.number, self.first_prompt, self.prompts, self._failed, self._offsets[-1], self._tokens, self.bytes,
            {name: self.kinds[name] for name in sorted(self._rows)},
        )  # fmt: skip
        tensors = [(name, *self._tensor(name)) for name in (*_INDEX_ARRAYS, *sorted(self._rows))]
        tensors.sort(key=lambda tensor: -tensor[1].itemsize)
        with rows.open("wb") as file_of_rows:
            file_of_rows.write(header(_metadata(info), [tensor[:3] for tensor in tensors]))
            for _, dtype, _, parts in tensors:
                for part in parts:
                    if part.size:
                        values = np.ascontiguousarray(part.astype(dtype, copy=False))
                        file_of_rows.write(values.view(np.uint8).data)
        return info

    def _add_rows(self, name: str, rows: Array, count: int, item: Item) -> None:
        if self.prompts > self._failed and name not in self._rows:
            raise self._differs(item, f"it has rows of {name}, which the prompts before it lack")
        parts = self._rows.setdefault(name, [])
        if len(rows) != count:
            raise self._differs(item, f"it has {len(rows)} rows of {name}, and {count} of its other points")
        dtype = self._dtype or rows.dtype
        kind = (dtype.name, rows.shape[1])
        first = self.kinds.setdefault(name, kind)
        if kind != first:
            raise self._differs(item, f"its rows of {name} are {kind_text(kind)}, and those before {kind_text(first)}")
        parts.append(rows)
        self.bytes += rows.shape[0] * rows.shape[1] * dtype.itemsize

    def _line(self, item: Item, rows: int) -> dict[str, Any]:
        first = self._offsets[-1]
        self._offsets.append(first + rows)
        return {
            "index": self.first_prompt + self.prompts,
            "input_row": item.row,
            "sha256": item.digest,
            "first_row": first,
            "rows": rows,
            "labels": dict(item.labels),
            **({"documents": item.documents} if item.documents else {}),
            **({"left_out": item.left_out} if item.left_out else {}),
        }

    def _tensor(self, name: str) -> tuple[np.dtype[Any], list[int], Sequence[Array]]:
        if name == "offsets":
            return np.dtype(np.int64), [len(self._offsets)], [np.array(self._offsets, np.int64)]
        if name == "prompt":
            indices = np.arange(self.first_prompt, self.first_prompt + self.prompts)
            return np.dtype(np.int64), [self._offsets[-1]], [np.repeat(indices, np.diff(self._offsets))]
        if name in self._columns:
            return np.dtype(np.int64), [self._offsets[-1]], self._columns[name]
        parts = self._rows[name]
        return self._type(parts), [self._offsets[-1], parts[0].shape[1]], parts

    def _type(self, parts: Sequence[Array]) -> np.dtype[Any]:
        return self._dtype or parts[0].dtype

    def _differs(self, item: Item, how: str) -> InvalidRequest:
        return InvalidRequest(
            f"{item.where}: {how}. All prompts of a job need rows of the same kind. Use services of one model, "
            "dtype and encoding.",
            reason="INVALID_FIELD",
        )


def kind_text(kind: tuple[str, int]) -> str:
    """Return an element type and a width for people."""
    return f"{kind[1]} × {kind[0]}"


def read_info(path: Path) -> ShardInfo:
    """Return what a file of rows says about itself.

    Raises:
        InvalidRequest: It is damaged, or not a shard.
    """
    document, data_start = _read_header(path)
    facts = document.get("__metadata__", {})
    end = max((item["data_offsets"][1] for name, item in document.items() if name != "__metadata__"), default=0)
    if facts.get("format") != FORMAT or path.stat().st_size != data_start + end:
        raise _damaged(path)
    numbers = {name: int(facts[name]) for name in ("number", "first_prompt", "prompts", "failed", "tokens", "bytes")}
    tensors = {
        name: (_BY_NAME[item["dtype"]].name, item["shape"][1])
        for name, item in sorted(document.items())
        if name not in ("__metadata__", *_INDEX_ARRAYS)
    }
    return ShardInfo(**numbers, rows=document["positions"]["shape"][0], tensors=tensors)


def map_all(paths: Sequence[Path]) -> list[dict[str, Array]]:
    """Return the arrays of files of rows, mapped into memory and read-only.

    Each file stays open. If the process may not have as many open, this raises its limit.

    Raises:
        OSError: The system does not allow as many open files.
    """
    _allow_open_files(len(paths))
    try:
        return [_map_arrays(path) for path in paths]
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            errno.EMFILE,
            f"{paths[0].parent} has {len(paths)} files of rows, which are all opened, but this process may not have as "
            f"many files open. Raise the limit with `ulimit -n {len(paths) + _OTHER_FILES}`, or extract with a larger "
            "shard_bytes",
        ) from None


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of open files, as far as the hard limit allows, if so many more would exceed it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    own = Path("/proc/self/fd")
    wanted = count + _OTHER_FILES + (sum(1 for _ in own.iterdir()) if own.is_dir() else 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _map_arrays(path: Path) -> dict[str, Array]:
    """Return all arrays of a file of rows."""
    document, data_start = _read_header(path)
    del document["__metadata__"]
    data = np.memmap(path, np.uint8, "r")
    arrays = {}
    for name, item in document.items():
        start, end = (data_start + offset for offset in item["data_offsets"])
        arrays[name] = data[start:end].view(_BY_NAME[item["dtype"]]).reshape(item["shape"])
    return arrays


def read_prompts(folder: Path, shard: ShardInfo) -> Iterator[dict[str, Any]]:
    """Yield the lines of a shard's file of prompts.

    Raises:
        InvalidRequest: It is damaged: without one of its lines, later rows would get the labels of other prompts.
    """
    path, count = folder / shard.prompts_file, 0
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                line = json.loads(text, parse_constant=lambda _: None)  # earlier versions wrote NaN
            except ValueError:
                raise _damaged(path) from None
            if not isinstance(line, dict) or line.get("index") != shard.first_prompt + count:
                raise _damaged(path)
            count += 1
            yield line
    if count != shard.prompts:
        raise _damaged(path)


def _without_nan(value: Any) -> Any:
    """Return a value for JSON, which has neither NaN nor infinity: they become None."""
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _metadata(info: ShardInfo) -> dict[str, str]:
    names = ("number", "first_prompt", "prompts", "failed", "tokens", "bytes")
    return {"format": FORMAT, **{name: str(getattr(info, name)) for name in names}}


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise _damaged(path)
        try:
            document: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            raise _damaged(path) from None
    return document, 8 + length


def _damaged(path: Path) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is damaged, or not a shard of a job. Delete it and the shards after it, and run the job again.",
        reason="INVALID_FIELD",
    )
