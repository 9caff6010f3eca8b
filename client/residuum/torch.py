"""Captured rows as the data of a training loop. Needs torch, which nothing else of the client does.

Example:
    >>> from residuum.torch import ActivationDataset
    >>> data = ActivationDataset("localhost:50051", prefix="train-", layers=[12], batch_size=4096)
    >>> for batch in torch.utils.data.DataLoader(data, batch_size=None, num_workers=4):
    ...     loss = sae(batch.activations)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise ImportError("residuum.torch needs torch, which you choose for your machine: pip install torch.") from None

from residuum.captures.row_stream import RowChoice, StreamedRows, check_readable, look_up, share, stream_rows
from residuum.client import Client
from residuum.exceptions import InvalidRequest
from residuum.protocol.requests import RequestLike, check_id
from residuum.values.capture import SITES as _SITE_NUMBERS
from residuum.values.selections import LayersLike, PositionsLike, index_list

if TYPE_CHECKING:
    from residuum.rpc.credentials import TLS
    from residuum.transport.connection_settings import Token
    from residuum.values.manifest import Manifest

SITES: tuple[str, ...] = tuple(_SITE_NUMBERS)
"""The sites in the order in which batches number them."""

_FINAL = ("complete", "incomplete", "aborted")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ActivationBatch(NamedTuple):
    """Rows, and where each is from. All tensors have the rows as their first dimension; all but the first are int64."""

    activations: torch.Tensor
    """The rows; [rows, width] in the dataset's dtype."""
    captures: torch.Tensor
    """The capture, as an index into the dataset's `captures`."""
    sequences: torch.Tensor
    """The sequence."""
    sites: torch.Tensor
    """The site, as an index into `residuum.torch.SITES`."""
    layers: torch.Tensor
    """The layer."""
    positions: torch.Tensor
    """The position in prompt and reply."""
    token_ids: torch.Tensor
    """The token at this position; -1 where it is not known."""
    labels: torch.Tensor | None = None
    """The label of the row's capture; None if no labels were given."""


class ActivationDataset(IterableDataset[ActivationBatch]):
    """Rows of many captures, shuffled, in batches: each row once an epoch.

    It makes the batches itself, so give a DataLoader `batch_size=None`. Each of its workers reads captures of its own,
    over connections of its own. A row is copied twice on its way: into the shuffle buffer and from there into its
    batch. The order follows from `seed`, the epoch, and the number of workers.

    Args:
        endpoint: The inference service, host:port; or any if `store` is given.
        captures: The captures, by their ids or replies; None takes all that are complete and whose id begins with
            `prefix`. They are looked up once, here; all must be of one model, encoded and reduced alike, and have
            the layers, sites and sequences that are named.
        prefix: Only with `captures=None`.
        batch_size: Rows in a batch; the last of each worker may have fewer.
        shuffle_buffer: Rows among which each batch is drawn; a worker keeps so many in memory. 0: rows come capture by
            capture, in the store's order.
        layers: Only these; as for `Client.activations`, like the next four.
        sites: Only these sites.
        sequences: Only these sequences.
        positions: Only these positions.
        allow_partial: Take what is there of captures that are not complete.
        dtype: Of the activations; None means that in which they were captured, or float32 if they are decoded.
        labels: A number for each capture, by its id; int64 if all are whole, otherwise float32.
        seed: Another seed is another order.
        drop_last: Leave out batches that are not full.
        rank: Which of `world_size` processes that train together this is; each reads other captures.
        world_size: How many there are.
        concurrent_reads: Captures that a worker reads at the same time, so that the buffer has rows of several.
        store: As for `Client`, like the last four.
        timeout: Seconds that a call may take.
        token: The bearer token.
        tls: TLS.
        insecure: Whether a token may be sent in plain text.

    Raises:
        InvalidRequest: There is no such capture, one is unlike the others or lacks something that is named, or
            something in this cannot be meant so.
        UnknownCapture: One that is named is not there.
        CaptureNotComplete: One that is named is not complete, and partial ones are not allowed; or it has not ended.

    Example:
        >>> data = ActivationDataset("localhost:50051", prefix="train-", layers=[12], positions="generated")
        >>> for epoch in range(3):
        ...     data.set_epoch(epoch)
        ...     for batch in DataLoader(data, batch_size=None, num_workers=4, multiprocessing_context="spawn"):
        ...         step(batch.activations)
    """

    def __init__(
        self,
        endpoint: str,
        captures: Iterable[RequestLike] | None = None,
        *,
        prefix: str = "",
        batch_size: int = 1024,
        shuffle_buffer: int = 16384,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        allow_partial: bool = False,
        dtype: torch.dtype | None = None,
        labels: Mapping[str, float] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        concurrent_reads: int = 4,
        store: str | Iterable[str] | None = None,
        timeout: float | None = 30.0,
        token: Token = None,
        tls: TLS | bool | None = None,
        insecure: bool | None = None,
    ) -> None:
        for name, number, least in (
            ("batch_size", batch_size, 1), ("shuffle_buffer", shuffle_buffer, 0), ("world_size", world_size, 1),
            ("concurrent_reads", concurrent_reads, 1), ("rank", rank, 0),
        ):  # fmt: skip
            if number < least:
                raise InvalidRequest(f"{name} is {number}; it is at least {least}.", reason="INVALID_FIELD")
        if rank >= world_size:
            raise InvalidRequest(f"rank {rank} is not one of {world_size}; ranks count from 0.", reason="INVALID_FIELD")
        if captures is not None and (prefix or isinstance(captures, str)):
            raise InvalidRequest(
                "Give captures as a list of ids, or the beginning of their ids as prefix=.", reason="INVALID_FIELD"
            )
        stores = store if store is None or isinstance(store, str) else tuple(store)
        self._connection: dict[str, Any] = {
            "endpoint": endpoint, "store": stores, "timeout": timeout, "token": token, "tls": tls, "insecure": insecure,
        }  # fmt: skip
        self._choice = RowChoice(
            layers=layers,
            sites=sites,
            sequences=None if sequences is None else tuple(index_list("sequence", sequences)),
            positions=positions,
            allow_partial=allow_partial,
        )
        self._batch_size, self._shuffle_buffer, self._drop_last = batch_size, shuffle_buffer, drop_last
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._concurrent_reads = concurrent_reads
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that live on see it change
        self._yielded = self._to_skip = 0
        self.captures: tuple[str, ...] = ()
        """The ids of the captures, which batches number."""
        self.width = 0
        """Elements in a row, decoded."""
        self.dtype: torch.dtype = torch.float32
        """Of the activations."""
        self._look_up(captures, prefix, dtype)
        self._labels = _labels(labels, self.captures)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is: each has an order of its own. Workers that live on hear of it, too."""
        self._epoch.fill_(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return how far an iteration in this process has come: torchdata's StatefulDataLoader asks each worker."""
        return {"epoch": int(self._epoch), "batches": self._yielded}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Have the next iteration go on behind the batches of a state: they are read again, and left out."""
        self.set_epoch(state["epoch"])
        self._to_skip = state["batches"]

    def __iter__(self) -> Iterator[ActivationBatch]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        part, parts = self._rank * workers + number, self._world_size * workers
        epoch = int(self._epoch)
        order = share(len(self.captures), part, parts, shuffle=self._shuffle_buffer > 0, seed=self._seed, epoch=epoch)
        to_skip, self._to_skip, self._yielded = self._to_skip, 0, 0
        with Client(**self._connection) as client:
            rows = stream_rows(client, self.captures, order, self._choice, self._concurrent_reads, self._check_alike)
            for batch in self._batches(rows, np.random.default_rng([self._seed, epoch, part])):
                self._yielded += 1
                if self._yielded > to_skip:
                    yield batch

    def _batches(self, stream: Iterator[StreamedRows], rng: np.random.Generator) -> Iterator[ActivationBatch]:
        shuffled = self._shuffle_buffer > 0
        capacity = max(self._shuffle_buffer, self._batch_size)
        buffer = _Buffer(capacity, self.width, self.dtype, rng if shuffled else None)
        for rows in stream:
            at = 0
            while at < len(rows.positions):
                at += buffer.add(rows, at)
                if buffer.is_full:
                    yield self._labelled(buffer.draw(self._batch_size))
        while len(buffer) >= (self._batch_size if self._drop_last else 1):
            yield self._labelled(buffer.draw(min(self._batch_size, len(buffer))))

    def _labelled(self, batch: ActivationBatch) -> ActivationBatch:
        return batch if self._labels is None else batch._replace(labels=self._labels[batch.captures])

    def _look_up(self, captures: Iterable[RequestLike] | None, prefix: str, dtype: torch.dtype | None) -> None:
        with Client(**self._connection) as client:
            if captures is None:
                states = _FINAL if self._choice.allow_partial else _FINAL[:1]
                names = sorted(item.capture_id for item in client.captures(prefix=prefix, states=states))
            else:
                names = list(dict.fromkeys(map(check_id, captures)))
            if not names:
                like = f" whose id begins with {prefix!r}" if prefix else ""
                raise InvalidRequest(f"There is no capture{like} to read.", reason="INVALID_FIELD")
            self.captures = tuple(names)
            # Now, and not in the middle of an epoch, is the time to hear of one that does not fit.
            for manifest in look_up(client, names):
                check_readable(manifest, self._choice)
                if manifest.capture_id == names[0]:
                    self._adopt(manifest, dtype)
                self._check_alike(manifest)

    def _adopt(self, first: Manifest, dtype: torch.dtype | None) -> None:
        """Take over what all captures must have as the first one has it."""
        self._alike = _alike(first)
        form = first.row_format
        self.width = form.decoded_width
        self.dtype = dtype or _DTYPES[form.decoded_dtype.name]

    def _check_alike(self, manifest: Manifest) -> None:
        for name, first, other in zip(_ALIKE, self._alike, _alike(manifest), strict=True):
            if first != other:
                values = "" if name == "projected_onto" else f" ({first} and {other})"
                raise InvalidRequest(
                    f"{self.captures[0]} and {manifest.capture_id} differ in {name}{values}: captures of one dataset "
                    "are of one model, encoded and reduced alike. Make a dataset for each kind.",
                    reason="INVALID_FIELD",
                )


_ALIKE = ("model", "hidden_size", "encoding", "dimensions", "seed", "axis", "projected_onto", "reduction")
"""What captures must have in common, as manifests have it, so that an element means the same in all their rows."""


def _alike(manifest: Manifest) -> tuple[object, ...]:
    return tuple(getattr(manifest, name) for name in _ALIKE)


class _Buffer:
    """Rows of which batches are drawn. Memory is allotted once; the slots of drawn rows are filled again."""

    def __init__(self, capacity: int, width: int, dtype: torch.dtype, rng: np.random.Generator | None) -> None:
        """Make an empty buffer; without `rng` rows are drawn in the order in which they came."""
        self._rows = torch.empty((capacity, width), dtype=dtype)
        self._array = _array(self._rows)
        self._facts = np.empty((capacity, 6), dtype=np.int64)
        self._free = np.arange(capacity)
        self._filled = np.empty(0, dtype=np.int64)
        self._rng = rng

    def __len__(self) -> int:
        return len(self._filled)

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return not len(self._free)

    def add(self, part: StreamedRows, start: int) -> int:
        """Take rows from `start` on, as many as there is room for; return how many."""
        count = min(len(self._free), len(part.positions) - start)
        slots, self._free = self._free[:count], self._free[count:]
        taken = slice(start, start + count)
        self._array[slots] = part.rows[taken]
        where = (part.capture, part.sequence, SITES.index(part.site), part.layer)
        self._facts[slots, :4] = where
        self._facts[slots, 4] = part.positions[taken]
        self._facts[slots, 5] = part.token_ids[taken]
        self._filled = np.concatenate([self._filled, slots])
        return count

    def draw(self, count: int) -> ActivationBatch:
        """Take so many rows out."""
        if self._rng is not None:
            self._filled = self._rng.permutation(self._filled)
        slots, self._filled = self._filled[:count], self._filled[count:]
        self._free = np.concatenate([self._free, slots])
        facts = torch.from_numpy(np.ascontiguousarray(self._facts[slots].T))
        return ActivationBatch(self._rows[torch.from_numpy(slots)], *facts.unbind())


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array that shares its memory."""
    if tensor.dtype == torch.bfloat16:  # which numpy alone does not know
        bits: npt.NDArray[Any] = tensor.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def _labels(labels: Mapping[str, float] | None, captures: Sequence[str]) -> torch.Tensor | None:
    if labels is None:
        return None
    missing = [name for name in captures if name not in labels]
    if missing:
        raise InvalidRequest(
            f"There is no label for {missing[0]}, and {len(missing) - 1} more of {len(captures)} captures.",
            reason="INVALID_FIELD",
        )
    numbers = [labels[name] for name in captures]
    whole = all(isinstance(number, (int, np.integer)) for number in numbers)
    return torch.tensor(numbers, dtype=torch.int64 if whole else torch.float32)
