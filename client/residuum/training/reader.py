"""Reads the rows of an extraction in a random order: a group in memory, and the next one on its way."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.extraction.reader import Extracted, LayerRows
from residuum.training.order import Group, Layout, Numbers, Order
from residuum.values.points import parse_points, point_names

Array = npt.NDArray[Any]
Source = Extracted | str | os.PathLike[str]
Points = str | Iterable[str] | None
Rows = tuple[Numbers, list[Array]]
"""The numbers of rows, and the rows of each point."""


@dataclass
class Loaded:
    """A group in memory."""

    group: Group
    rows: list[Array]
    """The rows of each point in the order in which they were read, as integers; it may be longer than the group."""


class ShuffledReader:
    """The rows of some points in the order of an epoch. The rows of a token at all points stay together."""

    def __init__(
        self, source: Source, points: Points, *, seed: int, shuffle: bool, where: Any, buffer_bytes: int,
        block_bytes: int, allow_partial: bool,
    ) -> None:  # fmt: skip
        """Open the files; see `ActivationBatches`."""
        rows = source if isinstance(source, Extracted) else Extracted(source)
        if not rows.is_complete and not allow_partial:
            raise InvalidRequest(
                f"The job in {rows.folder} is not complete. Run it again to finish it, or give allow_partial=True.",
                reason="INVALID_FIELD",
            )
        self.source = rows
        self.points = chosen_points(rows, points)
        """The points that are read."""
        self.layers: list[LayerRows] = [rows.at(point) for point in self.points]
        """Their rows."""
        self._seed, self._shuffle = seed, shuffle
        self._parts = [[_as_words(part) for part in layer.shards] for layer in self.layers]
        width = sum(layer.shape[1] * layer.dtype.itemsize for layer in self.layers)
        mask = None if where is None else _mask(where, len(rows))
        block_rows = max(1, block_bytes // width)
        self.layout = Layout(
            [len(part) for part in self.layers[0].shards], block_rows=block_rows,
            group_rows=max(block_rows, buffer_bytes // 2 // width), where=mask,
        )  # fmt: skip
        if not self.layout.total:
            raise InvalidRequest(f"There are no rows to read in {rows.folder}.", reason="INVALID_FIELD")
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="residuum-training")
        self._order: tuple[int, Order] | None = None
        self._loaded: dict[tuple[int, int], Future[Loaded]] = {}
        self._free: list[list[Array]] = []

    def read(self, epoch: int, start: int, stop: int) -> Iterator[Rows]:
        """Yield the rows of some places of an epoch's order: a copy of a piece of each group that has some."""
        order = self._order_of(epoch)
        while start < stop:
            number = order.group_at(start)
            first, last = order.group_starts[number : number + 2].tolist()
            loaded = self._group(epoch, order, number)
            part = slice(start - first, min(stop, last) - first)
            taken = loaded.group.taken[part]
            values = [
                words.take(taken, axis=0).view(layer.dtype)
                for words, layer in zip(loaded.rows, self.layers, strict=True)
            ]
            yield loaded.group.numbers[part], values
            start = min(stop, last)

    def close(self) -> None:
        """Stop reading ahead."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._loaded.clear()

    def _order_of(self, epoch: int) -> Order:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, Order(self.layout, seed=self._seed, epoch=epoch, shuffle=self._shuffle))
        return self._order[1]

    def _group(self, epoch: int, order: Order, number: int) -> Loaded:
        """Return a group, and begin to read the next one."""
        key = (epoch, number)
        for old in [other for other in self._loaded if other not in (key, (epoch, number + 1))]:
            future = self._loaded.pop(old)
            if not future.cancel() and future.done() and future.exception() is None:
                self._free.append(future.result().rows)  # new memory costs more time than reading into it
        if key not in self._loaded:
            self._begin(epoch, order, number)
        found = self._loaded[key].result()
        if number + 2 < len(order.group_starts) and (epoch, number + 1) not in self._loaded:
            self._begin(epoch, order, number + 1)
        return found

    def _begin(self, epoch: int, order: Order, number: int) -> None:
        memory = self._free.pop() if self._free else None
        self._loaded[epoch, number] = self._threads.submit(self._load, order, number, memory)

    def _load(self, order: Order, number: int, memory: list[Array] | None) -> Loaded:
        group = order.group(number)
        count = len(group.taken)
        if memory is None or len(memory[0]) < count:
            shapes = [(count, layer.shape[1]) for layer in self.layers]
            memory = [np.empty(shape, parts[0].dtype) for shape, parts in zip(shapes, self._parts, strict=True)]
        for words, parts in zip(memory, self._parts, strict=True):
            for piece in group.pieces:
                _expect(parts[piece.shard], piece.rows)
            at = 0
            for piece in group.pieces:
                words[at : at + piece.count] = parts[piece.shard][piece.rows]
                at += piece.count
        return Loaded(group, memory)


def chosen_points(rows: Extracted, points: Points) -> tuple[str, ...]:
    """Return the points that are named, such as "resid_post.12", in the order given; all of them without names.

    Raises:
        InvalidRequest: The extraction lacks one, or none is named.
    """
    if points is None:
        return rows.points
    given = [points] if isinstance(points, str) else list(points)
    names = [name for item in given for name in point_names(parse_points(item))]
    lacking = [name for name in names if name not in rows.points]
    if lacking or not names:
        raise InvalidRequest(
            f"{rows.folder} has no rows of {lacking[0] if lacking else 'no point'}. Choose among "
            f"{', '.join(rows.points)}.",
            reason="INVALID_FIELD",
        )
    return tuple(dict.fromkeys(names))


def check_same_width(layers: Sequence[LayerRows], points: Sequence[str]) -> None:
    """Check that the rows of several points fit into one array.

    Raises:
        InvalidRequest: They have different widths or element types.
    """
    kinds = {(layer.shape[1], layer.dtype.name) for layer in layers}
    if len(kinds) > 1:
        found = ", ".join(f"{name} {layer.shape[1]}" for name, layer in zip(points, layers, strict=True))
        raise InvalidRequest(
            f"The rows have different widths: {found}. Choose points of one width.", reason="INVALID_FIELD"
        )


def _mask(where: Any, count: int) -> npt.NDArray[np.bool_]:
    mask = np.asarray(where)
    if mask.dtype != np.bool_ or mask.shape != (count,):
        raise InvalidRequest(
            f"where= must be an array of {count} bools, one for each row, not {mask.dtype} {mask.shape}.",
            reason="INVALID_FIELD",
        )
    return mask


def _expect(part: Array, rows: slice | Numbers) -> None:
    """Tell the kernel that rows will be read, so that it reads many blocks at once."""
    mapped: Any = part
    while isinstance(mapped.base, np.ndarray):
        mapped = mapped.base
    if not isinstance(rows, slice) or not isinstance(mapped.base, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    first = part.ctypes.data - mapped.ctypes.data + rows.start * part.strides[0]
    begin = first // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.base.madvise(mmap.MADV_WILLNEED, begin, first - begin + (rows.stop - rows.start) * part.strides[0])


def _as_words(part: Array) -> Array:
    """Return rows as integers of the same size: numpy copies bfloat16 one element at a time."""
    return part.view(f"u{part.dtype.itemsize}")
