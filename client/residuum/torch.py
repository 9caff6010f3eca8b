"""Captured rows as training data for torch. Only this module and `residuum.training` need torch.

Example:
    >>> from residuum.torch import ActivationDataset
    >>> data = ActivationDataset("localhost:50051", prefix="train-", layers=[12], batch_size=4096)
    >>> for batch in torch.utils.data.DataLoader(data, batch_size=None, num_workers=4):
    ...     loss = sae(batch.activations)
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise ImportError("residuum.torch needs torch. Install the build for your machine: pip install torch.") from None

from residuum.captures.archive import Archive, is_archive
from residuum.captures.row_stream import (
    RowChoice,
    StreamedRows,
    check_readable,
    count_rows,
    look_up,
    places,
    row_format,
    share,
    stream_aligned,
    stream_rows,
)
from residuum.client import Client
from residuum.exceptions import InvalidRequest
from residuum.protocol.arguments import check_flag
from residuum.protocol.captures.many import check_choice, check_ids, check_some, warn_of_left_out, warn_of_no_rows
from residuum.protocol.captures.stores import check_stores
from residuum.protocol.captures.tenants import tenant_of
from residuum.protocol.deadlines import Deadline
from residuum.protocol.requests import RequestLike
from residuum.values.captures.alike import Kind
from residuum.values.replies.capture_summaries import CaptureSummary
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike, index_list
from residuum.values.selections.points import SITES as _SITE_NUMBERS

if TYPE_CHECKING:
    from residuum.rpc.credentials import TLS
    from residuum.transport.connection_settings import Token
    from residuum.values.captures.manifest import Manifest

SITES: tuple[str, ...] = tuple(_SITE_NUMBERS)
"""The sites in the order in which batches number them."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BATCH_DTYPES = (*_DTYPES.values(), torch.float64)


class ActivationBatch(NamedTuple):
    """A batch of rows with their origins. The first dimension of all tensors is the rows.

    All tensors except `activations` and `labels` are int64. In an aligned batch, a row is a token with its rows at all
    places, and `sites` and `layers` are those of the places.
    """

    activations: torch.Tensor
    """The rows in the dataset's dtype; [rows, width], or [tokens, places, width] if the dataset is aligned."""
    captures: torch.Tensor
    """Each row's capture, as an index into the dataset's `captures`."""
    sequences: torch.Tensor
    """Each row's sequence."""
    sites: torch.Tensor
    """Each row's site, as an index into `residuum.torch.SITES`; if aligned, the site of each place, [places]."""
    layers: torch.Tensor
    """Each row's layer; if aligned, the layer of each place, [places]."""
    positions: torch.Tensor
    """Each row's position, counted over prompt and reply."""
    token_ids: torch.Tensor
    """The token ID at each row's position; -1 if unknown."""
    labels: torch.Tensor | None = None
    """The label of each row's capture; None if no labels were given."""


class ActivationDataset(IterableDataset[ActivationBatch]):
    """Shuffled batches of rows from many captures. Each row occurs once per epoch.

    The dataset makes the batches itself, so pass `batch_size=None` to DataLoader. Each worker reads its own share of
    the captures, over its own connections. Each row is copied twice: into the shuffle buffer, and from there into its
    batch. The order depends on `seed`, the epoch and the number of workers.

    `len(data)` is the number of batches of an epoch in this process; see `num_batches` for workers.

    Args:
        endpoint: The inference service, host:port; not needed if `store` is given.
        captures: The captures, as IDs or replies. None means all captures that `prefix` and `where` select: the dataset
            looks them up once, when it is created, and waits for open ones for up to `timeout` seconds. It leaves out
            those that are not complete with a warning (LeftOutWarning), unless `allow_partial` is true. All captures
            must come from one model with the same LoRA adapter or none, have the same encoding, reduction and
            `before_steering`, and have the selected layers, sites and sequences.
        prefix: The prefix of the captures' IDs; only with `captures=None`.
        where: A filter on the captures' labels, such as "split = train"; only with `captures=None`.
        aligned: Yield tokens instead of rows, each with its rows at all places (site, layer): `activations` is
            [tokens, places, width]. `data.places` names the places. All captures must have the same ones. A token of a
            partial capture that lacks a row is left out. Then `batch_size` and `shuffle_buffer` count tokens, and each
            worker also keeps the selected rows of `concurrent_reads` whole captures in memory.
        batch_size: Rows in a batch; the last batch of each worker may have fewer.
        shuffle_buffer: Rows from which each batch is drawn. Each worker keeps this many in memory. With 0, rows come in
            the order in which they are read: `concurrent_reads` captures in turn, each in the store's order. With
            `concurrent_reads=1`, they come capture by capture.
        layers: Read only these layers; this and the next four arguments are as for `Client.activations`.
        sites: Read only these sites.
        sequences: Read only these sequences.
        positions: Read only these positions. If no capture has any of them, there is a warning (EmptyCaptureWarning).
        allow_partial: Read the present rows of captures that are not complete.
        dtype: The dtype of the activations; None means that of the captured rows, or float32 for decoded rows.
        labels: A number for each capture, by its ID; or the name of a label of the captures, whose values are numbers
            or bools. The labels are int64 if all are whole, otherwise float32.
        seed: The seed of the shuffling.
        drop_last: Drop batches that are not full, and those that another rank does not have: all ranks then have
            equally many batches, as training with DistributedDataParallel needs it. Without it, they may differ.
        rank: The index of this process among the `world_size` processes that train together. Each process reads
            different captures.
        world_size: The number of processes that train together.
        concurrent_reads: Captures that a worker reads at once, so that the buffer mixes rows of several captures.
        store: The store's address, or the URL of its archive, such as "s3://bucket/prefix"; see `Archive`. This and the
            next five arguments are as for `Client`.
        timeout: Seconds that a call may take.
        tenant: The tenant whose captures are read; None for the token's own, and for the default tenant in an archive.
        token: The bearer token.
        tls: TLS settings.
        insecure: Whether a token may be sent in plain text.

    Raises:
        InvalidRequest: There is no capture to read; captures differ, or lack selected rows; an argument is invalid; or
            neither `endpoint` nor `store` is given.
        UnknownCapture: A named capture does not exist.
        CaptureNotComplete: A named capture is open; or it is not complete and partial captures are not allowed.

    Example:
        >>> data = ActivationDataset("localhost:50051", prefix="train-", layers=[12], positions="generated")
        >>> for epoch in range(3):
        ...     data.set_epoch(epoch)
        ...     for batch in DataLoader(data, batch_size=None, num_workers=4, multiprocessing_context="spawn"):
        ...         step(batch.activations)
    """

    def __init__(
        self,
        endpoint: str = "",
        captures: Iterable[RequestLike] | None = None,
        *,
        prefix: str = "",
        where: str = "",
        aligned: bool = False,
        batch_size: int = 1024,
        shuffle_buffer: int = 16384,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        allow_partial: bool = False,
        dtype: torch.dtype | None = None,
        labels: Mapping[str, float] | str | None = None,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        concurrent_reads: int = 4,
        store: str | Iterable[str] | None = None,
        timeout: float | None = 30.0,
        tenant: str | None = None,
        token: Token = None,
        tls: TLS | bool | None = None,
        insecure: bool | None = None,
    ) -> None:
        for name, number, minimum in (
            ("batch_size", batch_size, 1), ("shuffle_buffer", shuffle_buffer, 0), ("world_size", world_size, 1),
            ("concurrent_reads", concurrent_reads, 1), ("rank", rank, 0), ("seed", seed, 0),
        ):  # fmt: skip
            if not isinstance(number, (int, np.integer)):
                raise InvalidRequest(f"{name} must be a whole number, not {number!r}.", reason="INVALID_FIELD")
            if number < minimum:
                raise InvalidRequest(f"{name} must be at least {minimum}, not {number}.", reason="INVALID_FIELD")
        check_flag("aligned", aligned)
        check_flag("drop_last", drop_last)
        if rank >= world_size:
            message = f"rank {rank} does not exist: with world_size={world_size}, ranks are 0 to {world_size - 1}."
            raise InvalidRequest(message, reason="INVALID_FIELD")
        if dtype is not None and dtype not in _BATCH_DTYPES:
            raise InvalidRequest(
                f"dtype must be one of {', '.join(map(str, _BATCH_DTYPES))}, or None, not {dtype!r}. Convert the "
                "batches to others.",
                reason="INVALID_FIELD",
            )
        if captures is not None:
            check_choice(captures, prefix, where)
        stores = check_stores(store)
        self._connection: dict[str, Any] = {
            "endpoint": endpoint, "store": stores, "timeout": timeout, "tenant": tenant, "token": token, "tls": tls,
            "insecure": insecure,
        }  # fmt: skip
        is_url = isinstance(stores, str) and is_archive(stores)
        self._archive = Archive(str(stores), tenant=tenant or "") if is_url else None
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
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # so that persistent workers see changes
        self._yielded = self._to_skip = 0
        self._loaded_epoch: int | None = None  # of a state that the next iteration continues
        self._iterated_epoch: int | None = None  # of the iteration in this process
        self._loaded_in = (0, 1)  # the worker that loaded a state, whose batches are skipped
        self._aligned = aligned
        self.captures: tuple[str, ...] = ()
        """The IDs of the captures. Batches refer to them by index."""
        self.width = 0
        """Elements of a decoded row."""
        self.dtype: torch.dtype = torch.float32
        """The dtype of the activations."""
        self.places: tuple[tuple[str, int], ...] = ()
        """If aligned, the site and the layer of each place, in the order of the second dimension of `activations`."""
        self._counts: list[int] = []
        found = self._look_up(captures, prefix, where, dtype, labels if isinstance(labels, str) else None)
        self._order_digest = self._digest_of_order()
        if not any(self._counts) and not self._choice.allow_partial:
            warn_of_no_rows(self.captures, "the dataset has no rows")
        self._labels = _labels(found if isinstance(labels, str) else labels, self.captures)

    def __len__(self) -> int:
        return self.num_batches()

    def num_batches(self, num_workers: int = 0) -> int:
        """Return the number of batches of the current epoch in this process (`rank`).

        Each worker has a last batch of its own. The number may change from epoch to epoch, because each worker then
        reads other captures. All ranks have the same number only with `drop_last`.

        Args:
            num_workers: The workers of the DataLoader; 0 if there are none.

        Example:
            >>> loader = DataLoader(data, batch_size=None, num_workers=4)
            >>> for batch in tqdm(loader, total=data.num_batches(4)):
            ...     step(batch.activations)
        """
        workers = max(num_workers, 1)
        return sum(self._batches_of(worker, workers, self._current_epoch) for worker in range(workers))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which changes the order of rows. Persistent workers see it, too.

        After `load_state_dict`, another epoch than that of the state begins at its beginning. But StatefulDataLoader
        loads its state when it is iterated: an epoch that was not over is continued, whatever was set.
        """
        if epoch != self._current_epoch:
            self._to_skip = self._yielded = 0
        self._loaded_epoch = self._iterated_epoch = None
        self._epoch.fill_(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the progress of the iteration in this process, for torchdata's StatefulDataLoader."""
        return {"epoch": self._current_epoch, "batches": self._yielded, "data": self._order_digest}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next iteration continue after a state. It reads the earlier batches again and skips them.

        The next iteration must be in this process, too: in workers of a plain DataLoader, it raises InvalidRequest.

        Raises:
            InvalidRequest: The state is of other captures or arguments, whose rows come in another order.
        """
        if state.get("data", self._order_digest) != self._order_digest:
            raise InvalidRequest(
                "The state is of other captures or arguments, so the rows come in another order, and some would be "
                "left out. Use the same arguments, and captures= with the `captures` of the first dataset.",
                reason="INVALID_FIELD",
            )
        # Not with set_epoch: StatefulDataLoader loads the state of an epoch that was over after the next one was set.
        self._loaded_epoch = state["epoch"]
        self._to_skip = self._yielded = state["batches"]
        self._loaded_in = _worker()

    def __iter__(self) -> Iterator[ActivationBatch]:
        # Now, not at the first batch: StatefulDataLoader leaves the iterator of an epoch that was over unused.
        to_skip, self._to_skip = self._to_skip, 0
        self._yielded = to_skip
        if to_skip and _worker() != self._loaded_in:
            raise InvalidRequest(
                "The state is of an iteration without workers, so workers cannot continue it: each one would leave out "
                f"{to_skip} batches of its own. Use num_workers=0, or torchdata's StatefulDataLoader, which stores a "
                "state for each worker.",
                reason="INVALID_FIELD",
            )
        loaded, self._loaded_epoch = self._loaded_epoch, None
        self._iterated_epoch = int(self._epoch) if loaded is None else loaded
        return self._iterate(to_skip, self._iterated_epoch)

    def _iterate(self, to_skip: int, epoch: int) -> Iterator[ActivationBatch]:
        number, workers = _worker()
        part = self._rank * workers + number
        order = self._share(part, self._world_size * workers, epoch)
        # Without drop_last, each rank has all its batches, and reads to the end.
        stop = self._batches_of(number, workers, epoch) if self._drop_last else None
        stream = stream_aligned if self._aligned else stream_rows
        with self._open() as client:
            rows = stream(client, self.captures, order, self._choice, self._concurrent_reads, self._check_alike)
            batches = self._batches(rows, np.random.default_rng([self._seed, epoch, part]))
            for batch in itertools.islice(batches, to_skip, stop):
                if self._yielded == to_skip:
                    self._epoch.fill_(epoch)  # of a state: the iteration after this one has it, too
                self._yielded += 1
                yield batch

    def _digest_of_order(self) -> int:
        """Return a digest of what decides the order of the rows, beside the epoch and the number of workers."""
        rows = self._choice.plan(self.captures[0]).request.SerializeToString(deterministic=True)
        decisive = (
            self.captures, self._counts, rows, self._aligned, self._batch_size, self._shuffle_buffer, self._seed,
            self._rank, self._world_size, self._concurrent_reads,
        )  # fmt: skip
        return zlib.crc32(repr(decisive).encode())

    def _open(self) -> Client | Archive:
        return self._archive or Client(**self._connection)

    @property
    def _current_epoch(self) -> int:
        """The epoch of the next iteration, or of the one that has begun."""
        found = self._iterated_epoch if self._loaded_epoch is None else self._loaded_epoch
        return int(self._epoch) if found is None else found

    def _batches_of(self, worker: int, workers: int, epoch: int) -> int:
        """Return the number of batches of a worker in an epoch."""
        counts = [self._counts[number] for number in self._share(0, 1, epoch)]  # shuffled once, not for each rank
        ranks = range(self._world_size) if self._drop_last else [self._rank]
        rows = min(sum(counts[rank * workers + worker :: self._world_size * workers]) for rank in ranks)
        return rows // self._batch_size if self._drop_last else -(-rows // self._batch_size)

    def _share(self, part: int, parts: int, epoch: int) -> list[int]:
        """Return the captures of a part in an epoch, as indices, in the order in which they are read."""
        shuffled = self._shuffle_buffer > 0
        return share(len(self.captures), part, parts, shuffle=shuffled, seed=self._seed, epoch=epoch)

    def _batches(self, stream: Iterator[StreamedRows], rng: np.random.Generator) -> Iterator[ActivationBatch]:
        shuffled = self._shuffle_buffer > 0
        capacity = max(self._shuffle_buffer, self._batch_size)
        shape = (len(self.places), self.width) if self._aligned else (self.width,)
        buffer = _Buffer(capacity, shape, self.dtype, rng if shuffled else None)
        for rows in stream:
            at = 0
            while at < len(rows.positions):
                at += buffer.add(rows, at)
                if buffer.is_full:
                    yield self._labelled(buffer.draw(self._batch_size))
        while len(buffer) >= (self._batch_size if self._drop_last else 1):
            yield self._labelled(buffer.draw(min(self._batch_size, len(buffer))))

    def _labelled(self, batch: ActivationBatch) -> ActivationBatch:
        if self._aligned:
            sites = torch.tensor([SITES.index(site) for site, _ in self.places], dtype=torch.int64)
            layers = torch.tensor([layer for _, layer in self.places], dtype=torch.int64)
            batch = batch._replace(sites=sites, layers=layers)
        return batch if self._labels is None else batch._replace(labels=self._labels[batch.captures])

    def _look_up(
        self,
        captures: Iterable[RequestLike] | None,
        prefix: str,
        where: str,
        dtype: torch.dtype | None,
        label: str | None,
    ) -> dict[str, float]:
        """Look up and check all captures. Return the value of a label of each that has one."""
        values: dict[str, float] = {}
        found: list[CaptureSummary] = []
        timeout = self._connection["timeout"]
        if captures is None:
            with self._open() as client:
                found = client._selected(prefix, where, Deadline(timeout))  # noqa: SLF001 - with retries
            self._connection["tenant"] = tenant_of(found, self._connection["tenant"])
        with self._open() as client:
            for summary in found:
                if summary.state == "open":
                    client.manifest(summary.capture_id, wait=True if timeout is None else timeout)
            names = [summary.capture_id for summary in found] if captures is None else check_ids(captures)
            leaves_out = captures is None and not self._choice.allow_partial
            left_out: list[Manifest] = []
            taken: list[str] = []
            # Check all captures now, so that none fails in the middle of an epoch.
            for manifest in look_up(client, check_some(names, prefix, where)):
                if leaves_out and manifest.state != "complete":
                    left_out.append(manifest)
                    continue
                check_readable(manifest, self._choice)
                if not taken:
                    self._adopt(manifest, dtype)
                taken.append(manifest.capture_id)
                self._check_alike(manifest)
                self._counts.append(count_rows(manifest, self._choice, aligned=self._aligned))
                if label is not None and label in manifest.labels:
                    values[manifest.capture_id] = _number(manifest, label)
        self.captures = tuple(check_some(taken, prefix, where))
        warn_of_left_out(left_out, len(names))
        return values

    def _adopt(self, first: Manifest, dtype: torch.dtype | None) -> None:
        """Set the properties that all captures must share from the first capture."""
        self._kind = Kind(first)
        self.places = places(first, self._choice) if self._aligned else ()
        form = row_format(first, self._choice)
        self.width = form.decoded_width
        self.dtype = dtype or _DTYPES[form.decoded_dtype.name]

    def _check_alike(self, manifest: Manifest) -> None:
        self._kind.check(manifest, "dataset")
        if row_format(manifest, self._choice).decoded_width != self.width:
            raise InvalidRequest(
                f"Rows of {self._kind.first} have {self.width} elements, and rows of {manifest.capture_id} have "
                "another number at the chosen sites. Make a dataset for each width.",
                reason="INVALID_FIELD",
            )
        if self._aligned and places(manifest, self._choice) != self.places:
            raise InvalidRequest(
                f"{self._kind.first} and {manifest.capture_id} differ in their layers or sites. Captures of an aligned "
                "dataset must have the same ones. Select those that all have with layers= and sites=.",
                reason="INVALID_FIELD",
            )


def _worker() -> tuple[int, int]:
    """Return the number of this worker of a DataLoader, and how many there are; (0, 1) outside of workers."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


class _Buffer:
    """The shuffle buffer. Its memory is allocated once, and the slots of drawn rows are reused."""

    def __init__(
        self, capacity: int, shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator | None
    ) -> None:
        """Create an empty buffer for rows of a shape.

        Without `rng`, rows are drawn in the order in which they were added.
        """
        self._rows = torch.empty((capacity, *shape), dtype=dtype)
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
        """Copy rows from `start` on, as many as fit. Return how many."""
        count = min(len(self._free), len(part.positions) - start)
        slots, self._free = self._free[:count], self._free[count:]
        taken = slice(start, start + count)
        self._array[slots] = part.rows[taken]
        where = (part.capture, part.sequence, SITES.index(part.site) if part.site else -1, part.layer)
        self._facts[slots, :4] = where
        self._facts[slots, 4] = part.positions[taken]
        self._facts[slots, 5] = part.token_ids[taken]
        self._filled = np.concatenate([self._filled, slots])
        return count

    def draw(self, count: int) -> ActivationBatch:
        """Draw `count` rows and free their slots."""
        if self._rng is not None:
            self._filled = self._rng.permutation(self._filled)
        slots, self._filled = self._filled[:count], self._filled[count:]
        self._free = np.concatenate([self._free, slots])
        facts = torch.from_numpy(np.ascontiguousarray(self._facts[slots].T))
        return ActivationBatch(self._rows[torch.from_numpy(slots)], *facts.unbind())


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array that shares its memory."""
    if tensor.dtype == torch.bfloat16:  # numpy lacks it, so view the bits
        bits: npt.NDArray[Any] = tensor.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def _number(manifest: Manifest, label: str) -> float:
    """Return the value of a label, which must be a number or a bool."""
    value = manifest.labels[label]
    if isinstance(value, str):
        raise InvalidRequest(
            f"The label {label!r} of {manifest.capture_id} is the text {value!r}, but a tensor holds numbers. Give "
            "numbers with labels={id: number}.",
            reason="INVALID_FIELD",
        )
    return int(value) if isinstance(value, bool) else value


def _labels(labels: Mapping[str, float] | None, captures: Sequence[str]) -> torch.Tensor | None:
    if labels is None:
        return None
    missing = [name for name in captures if name not in labels]
    if missing:
        raise InvalidRequest(
            f"{len(missing)} of {len(captures)} captures have no label; the first is {missing[0]}. Label them all.",
            reason="INVALID_FIELD",
        )
    numbers = [labels[name] for name in captures]
    whole = all(isinstance(number, (int, np.integer)) for number in numbers)
    return torch.tensor(numbers, dtype=torch.int64 if whole else torch.float32)
