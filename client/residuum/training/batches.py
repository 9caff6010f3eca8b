"""Shuffled batches of the rows of an extraction, as tensors of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from residuum.exceptions import InvalidRequest
from residuum.protocol.arguments import check_flag
from residuum.training.reader import Array, Points, ShuffledReader, Source, check_same_width, check_whole


class Batch(NamedTuple):
    """Rows, and which ones they are."""

    activations: torch.Tensor
    """The rows; [rows, width], or [rows, points, width] if several points were chosen."""
    rows: npt.NDArray[np.int64]
    """The number of each row in the extraction: an index into its `token_ids`, `positions`, `prompt` and so on."""


class ActivationBatches(Iterator[Batch]):
    """An iterator over the rows of an extraction: shuffled over all files, for several epochs and ranks, resumable.

    The files are read in blocks of `block_bytes` in random order. Half of `buffer_bytes` is a group of such blocks,
    whose rows are shuffled; the other half is for the next group, which a thread reads meanwhile. So each row is read
    once an epoch, and the files in large pieces.

    `len(batches)` is the number of batches of one epoch on this rank, also if there are several.

    The order follows from `seed` and the epoch. All ranks compute it, and each takes its own part: the parts have no
    row in common, and together they have all rows.

    Args:
        source: The folder of `client.extract`, or its result.
        points: The points, such as "resid_post.12" or "blocks.12.hook_resid_post"; None means all. With several, the
            rows of each token at all points stay together, as crosscoders need them.
        batch_size: Rows in a batch. The last one of an epoch may have fewer.
        epochs: How often to read all rows; None means without end.
        shuffle: Whether to shuffle. Without it, rows come in the order of the files.
        seed: The seed of the order.
        where: Which rows to read, as an array of bools [rows]; None means all. For example, `rows.positions > 0` leaves
            out the first token of each prompt, whose rows are often far from all others.
        rank: The index of this process among the `world_size` processes that train together.
        world_size: The number of these processes.
        drop_last: Drop the last batch of an epoch if it is not full. All ranks then have equally many batches.
        dtype: The element type of the batches; None means that of the files.
        device: Where the batches are; None means in host memory.
        buffer_bytes: The approximate memory for rows.
        block_bytes: The approximate bytes that are read at once.
        allow_partial: Read a job that is not complete. Its rows so far are then the data.
        same_width: Refuse points of different widths, which no batch can have. `next_arrays` returns them separately.

    Raises:
        FileNotFoundError: There is no job in the folder.
        InvalidRequest: The job is not complete, lacks a point, or an argument is invalid.

    Example:
        >>> rows = residuum.Extracted("rows")
        >>> batches = ActivationBatches(rows, "resid_post.12", epochs=1, where=rows.positions > 0)
        >>> for batch in batches:
        ...     batch.activations, rows.token_ids[batch.rows]
    """

    def __init__(
        self, source: Source, points: Points = None, *, batch_size: int = 4096, epochs: int | None = None,
        shuffle: bool = True, seed: int = 0, where: npt.NDArray[np.bool_] | None = None, rank: int = 0,
        world_size: int = 1, drop_last: bool = False, dtype: torch.dtype | None = torch.float32,
        device: str | torch.device | None = None, buffer_bytes: int = 1 << 30, block_bytes: int = 1 << 20,
        allow_partial: bool = False, same_width: bool = True,
    ) -> None:  # fmt: skip
        for name, number, minimum in (
            ("batch_size", batch_size, 1), ("epochs", 1 if epochs is None else epochs, 1), ("rank", rank, 0),
            ("world_size", world_size, 1),
        ):  # fmt: skip
            check_whole(name, number, minimum)
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last), ("same_width", same_width)):
            check_flag(name, flag)
        check_dtype(dtype)
        if rank >= world_size:
            raise InvalidRequest(
                f"rank {rank} does not exist: with world_size={world_size}, ranks are 0 to {world_size - 1}."
            )
        self._reader = ShuffledReader(
            source, points, seed=seed, shuffle=shuffle, where=where, buffer_bytes=buffer_bytes,
            block_bytes=block_bytes, allow_partial=allow_partial,
        )  # fmt: skip
        if same_width:
            check_same_width(self._reader.layers, self._reader.points)
        self.folder = self._reader.source.folder
        """The folder of the extraction."""
        self.points = self._reader.points
        """The points, in the order of the second dimension of a batch of several."""
        self.width = self._reader.layers[0].shape[1]
        """The elements of a row."""
        self._batch_size, self._epochs = batch_size, epochs
        self._dtype, self._device = dtype, device
        total = self._reader.layout.total
        each = total // world_size
        self._start, self._stop = (number * total // world_size for number in (rank, rank + 1))
        if drop_last:
            self._start, self._stop = rank * each, rank * each + each // batch_size * batch_size
        self._epoch = self._batch = 0
        self._identity = {
            **self._reader.identity, "batch_size": batch_size, "rank": rank, "world_size": world_size,
            "drop_last": drop_last,
        }  # fmt: skip
        if self._start == self._stop:
            raise InvalidRequest(
                f"Rank {rank} has no batch: there are {total} rows for {world_size} ranks, in batches of {batch_size}.",
                reason="INVALID_FIELD",
            )

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank."""
        return math.ceil((self._stop - self._start) / self._batch_size)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    def __iter__(self) -> ActivationBatches:
        return self

    def __next__(self) -> Batch:
        numbers, values = self.next_arrays()
        tensors = [self._tensor(array) for array in values]
        return Batch(tensors[0] if len(tensors) == 1 else torch.stack(tensors, dim=1), numbers)

    def next_arrays(self) -> tuple[npt.NDArray[np.int64], list[Array]]:
        """Return the next batch as arrays: the numbers of its rows, and the rows of each point.

        Raises:
            StopIteration: All epochs are over.
        """
        if self._epochs is not None and self._epoch >= self._epochs:
            raise StopIteration
        start = self._start + self._batch * self._batch_size
        stop = min(start + self._batch_size, self._stop)
        is_last = self._epochs is not None and self._epoch + 1 >= self._epochs
        then = None if is_last else (self._epoch + 1, self._start)
        pieces = list(self._reader.read(self._epoch, start, stop, end=self._stop, then=then))
        self._batch += 1
        if self._batch == len(self):
            self._epoch, self._batch = self._epoch + 1, 0
        if len(pieces) == 1:
            return pieces[0]
        numbers = np.concatenate([part for part, _ in pieces])
        points = range(len(self.points))
        return numbers, [np.concatenate([values[point] for _, values in pieces]) for point in points]

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is. It can be saved with torch.save or as JSON."""
        return {"epoch": self._epoch, "batch": self._batch, "identity": dict(self._identity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which `state_dict` was called. No earlier rows are read.

        Raises:
            InvalidRequest: The state is of other data or arguments; the message says what differs.
        """
        before = state["identity"]
        for name, now in self._identity.items():
            if before.get(name) != now:
                raise InvalidRequest(
                    f"The state is of another iteration: {name} was {before.get(name)} and is {now}. Use the same data "
                    "and arguments.",
                    reason="INVALID_FIELD",
                )
        self._epoch, self._batch = state["epoch"], state["batch"]

    def close(self) -> None:
        """Stop the thread that reads ahead. The iterator cannot be used afterwards."""
        self._reader.close()

    def _tensor(self, values: Array) -> torch.Tensor:
        return tensor_of(values, self._dtype, self._device)


def tensor_of(values: Array, dtype: torch.dtype | None, device: str | torch.device | None) -> torch.Tensor:
    """Return rows as a tensor, which may share their memory."""
    if values.dtype.name == "bfloat16":
        found = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    else:
        found = torch.from_numpy(values)
    return found.to(device=device, dtype=dtype or found.dtype)


def check_dtype(dtype: Any) -> None:
    """Check an argument that is an element type.

    Raises:
        InvalidRequest: It is another value, such as a text, or a type without fractions.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidRequest(
            f"dtype= must be a floating-point dtype of torch, such as torch.float32, or None, not {dtype!r}."
        )
