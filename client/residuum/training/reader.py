"""Reads the rows of an extraction in a random order: a group in memory, and the next one on its way."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.extraction.results.reader import Extracted, LayerRows
from residuum.training.order import Group, Layout, Numbers, Order
from residuum.values.selections.points import parse_point

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
        for name, number, minimum in (
            ("seed", seed, 0),
            ("buffer_bytes", buffer_bytes, 1),
            ("block_bytes", block_bytes, 1),
        ):
            check_whole(name, number, minimum)
        rows.check_complete(allow_partial=allow_partial)
        if not len(rows):
            raise _no_rows(rows)
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
            raise _no_rows(rows)
        self.identity: dict[str, Any] = {
            "data": rows.fingerprint, "points": list(self.points), "rows": self.layout.total, "seed": seed,
            "shuffle": shuffle, "where": None if mask is None else zlib.crc32(np.packbits(mask).data),
            "blocks": [block_rows, self.layout.group_rows],
        }  # fmt: skip
        """What decides the order of the rows."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="residuum-training")
        self._orders: dict[int, Order] = {}
        self._loaded: dict[tuple[int, int], Future[Loaded]] = {}
        self._free: list[list[Array]] = []
        self._whole: list[Array] | None = None  # all rows, if they fit one group: they are read once for all epochs

    def read(
        self, epoch: int, start: int, stop: int, *, end: int | None = None, then: tuple[int, int] | None = None
    ) -> Iterator[Rows]:
        """Yield the rows of some places of an epoch's order: a copy of a piece of each group that has some.

        Args:
            epoch: The epoch.
            start: The first place.
            stop: The place after the last one.
            end: The place at which the caller's part of the epoch ends; None means the end of the epoch. No group
                behind it is read ahead.
            then: The epoch and the place that are read after `end`. Their group is read ahead.
        """
        order = self._order_of(epoch)
        end = self.layout.total if end is None else end
        while start < stop:
            number = order.group_at(start)
            first, last = order.group_starts[number : number + 2].tolist()
            following = (epoch, number + 1) if last < end else self._key_of(then)
            loaded = self._group((epoch, number), following)
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
        if epoch not in self._orders:
            order = Order(self.layout, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}  # also the one before it
        return self._orders[epoch]

    def _key_of(self, then: tuple[int, int] | None) -> tuple[int, int] | None:
        return None if then is None else (then[0], self._order_of(then[0]).group_at(then[1]))

    def _group(self, key: tuple[int, int], following: tuple[int, int] | None) -> Loaded:
        """Return a group, and begin to read the one that comes next.

        Args:
            key: The epoch and the number of the group.
            following: Those of the next group; it may be the same.
        """
        for old in [other for other in self._loaded if other not in (key, following)]:
            future = self._loaded.pop(old)
            if not future.cancel() and future.done() and future.exception() is None and self._whole is None:
                self._free.append(future.result().rows)  # new memory costs more time than reading into it
        if key not in self._loaded:
            self._begin(key)
        found = self._loaded[key].result()
        if following is not None and following not in self._loaded:
            self._begin(following)
        return found

    def _begin(self, key: tuple[int, int]) -> None:
        memory = self._free.pop() if self._free else None
        self._loaded[key] = self._threads.submit(self._load, self._order_of(key[0]), key[1], memory)

    def _load(self, order: Order, number: int, memory: list[Array] | None) -> Loaded:
        group = order.group(number)
        if self._whole is not None:
            return Loaded(group, self._whole)
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
        if self.layout.is_one_group:
            self._whole = memory
        return Loaded(group, memory)


def chosen_points(rows: Extracted, points: Points) -> tuple[str, ...]:
    """Return the points that are named, such as "resid_post.12", in the order given; all of them without names.

    Raises:
        InvalidRequest: The extraction lacks one, or none is named.
    """
    if points is None:
        return rows.points
    given = points.split(",") if isinstance(points, str) else list(points)
    names = [name for point in given for name in _names_of(rows, point)]
    lacking = [name for name in names if name not in rows.points]
    if lacking or not names:
        raise InvalidRequest(
            f"{rows.folder} has no rows of {lacking[0] if lacking else 'no point'}. Choose among "
            f"{', '.join(rows.points)}.",
            reason="INVALID_FIELD",
        )
    return tuple(dict.fromkeys(names))


def _names_of(rows: Extracted, point: str) -> list[str]:
    """Return the point at each of its layers; a site without layers stands for all that the extraction has."""
    site, layers = parse_point(point)
    if layers is not None:
        return [f"{site}.{layer}" for layer in layers]
    return [name for name in rows.points if name.rpartition(".")[0] == site] or [site]


def check_whole(name: str, number: Any, minimum: int) -> None:
    """Check an argument that counts something.

    Raises:
        InvalidRequest: It is no whole number, or too small.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
        raise InvalidRequest(f"{name}= must be a whole number of at least {minimum}, not {number!r}.")


def _no_rows(rows: Extracted) -> InvalidRequest:
    return InvalidRequest(f"There are no rows to read in {rows.folder}.", reason="INVALID_FIELD")


def check_same_width(layers: Sequence[LayerRows], points: Sequence[str]) -> None:
    """Check that the rows of several points fit into one array.

    Raises:
        InvalidRequest: They have different widths or element types.
    """
    kinds = {(layer.shape[1], layer.dtype.name) for layer in layers}
    if len(kinds) > 1:
        found = ", ".join(
            f"{name} {layer.shape[1]} × {layer.dtype.name}" for name, layer in zip(points, layers, strict=True)
        )
        raise InvalidRequest(
            f"The rows have different widths or element types: {found}. Choose points with the same ones.",
            reason="INVALID_FIELD",
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
