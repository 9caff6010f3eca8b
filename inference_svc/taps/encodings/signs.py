"""The signs of random projections on the device, made beside the model's steps and kept while they are of use."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from residuum.wire.projection import projection_signs
from svc_common.logs import get_logger

KEPT_BYTES = 256 << 20
"""What the matrices take at most that the service has a worker keep; one always may be kept, whatever it takes."""

IDLE_BYTES, IDLE_MATRICES = 16 << 20, 16
"""How many others stay at most, and what they take."""

_log = get_logger(__name__)


class Signs(NamedTuple):
    """Which matrix."""

    seed: int
    dimensions: int
    dtype: torch.dtype


def most_bytes(width: int) -> int:
    """Return what all matrices for rows of `width` elements take at most, in bytes, if no more are kept than may be.

    None has more than `width` dimensions.
    """
    return max(KEPT_BYTES, 4 * width * width) + IDLE_BYTES


class SignCache:
    """Matrices by what they are of: those that requests need, and beside them a few that were used last.

    To make one takes as long as many steps, and callers choose the seeds. So those that requests need are asked for
    before the requests come (`keep`), and a thread makes them: the step only looks them up. Safe for threads.
    """

    def __init__(self, width: int, device: torch.device, max_bytes: int = IDLE_BYTES) -> None:
        """Keep matrices for rows of `width` elements; no more than so many bytes of those that nobody keeps."""
        self._width = width
        self._device = device
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._matrices: OrderedDict[Signs, Tensor] = OrderedDict()
        self._kept: frozenset[Signs] = frozenset()
        self._to_make: deque[Signs] = deque()
        self._making: Signs | None = None
        self._stream: torch.cuda.Stream | None = None
        self._maker: threading.Thread | None = None
        self._errors: dict[Signs, str] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all that are there."""
        with self._lock:
            return sum(matrix.nbytes for matrix in self._matrices.values())

    def keep(self, wanted: Sequence[Signs]) -> list[bool | str]:
        """Have matrices made that are not there, and keep them until this is called without them.

        Returns:
            Of each whether it is there by now; or, once, why it could not be made, for want of memory for example. It
            is tried again if it is asked for again.
        """
        with self._lock:
            self._kept = frozenset(wanted)
            for key in self._errors.keys() - self._kept:
                del self._errors[key]
            states = {key: self._state(key) for key in dict.fromkeys(wanted)}
            if self._to_make and self._maker is None:
                self._maker = threading.Thread(target=self._run, name="residuum-signs", daemon=True)
                self._maker.start()
            self._evict()
            return [states[key] for key in wanted]

    def get(self, seed: int, dimensions: int, dtype: torch.dtype) -> Tensor:
        """Return the signs of a projection, 1 and -1, [width, dimensions]; made now if nobody has asked for them."""
        key = Signs(seed, dimensions, dtype)
        with self._lock:
            found = self._matrices.get(key)
            if found is not None:
                self._matrices.move_to_end(key)
                return found
        return self._add(key, self._make(key))

    def _state(self, key: Signs) -> bool | str:
        """Return what `keep` tells of a matrix, and have it made if it must be."""
        if key in self._matrices:
            return True
        if key in self._errors:
            return self._errors.pop(key)
        if key != self._making and key not in self._to_make:
            self._to_make.append(key)
        return False

    def _run(self) -> None:
        """Make what is asked for; the thread ends when nothing is left."""
        while (key := self._next()) is not None:
            try:
                with self._own_stream() as stream:
                    signs = self._make(key)
                    if stream is not None:
                        stream.synchronize()  # others look it up on streams of their own
                self._add(key, signs)
            except Exception as error:  # noqa: BLE001 - told where somebody waits for it; others may be made
                _log.exception("signs of a random projection cannot be made", seed=key.seed, dimensions=key.dimensions)
                with self._lock:
                    self._errors[key] = type(error).__name__

    @contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Work on a stream of one's own, if the device has streams."""
        if self._device.type != "cuda":
            yield None
            return
        torch.cuda.set_device(self._device)
        if self._stream is None:  # one for all: memory that is freed is kept for the stream on which it was allotted
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            yield self._stream

    def _next(self) -> Signs | None:
        with self._lock:
            while self._to_make:
                self._making = self._to_make.popleft()
                if self._making in self._kept and self._making not in self._matrices:
                    return self._making
            self._making = self._maker = None
            return None

    def _make(self, key: Signs) -> Tensor:
        signs = torch.from_numpy(projection_signs(key.seed, self._width, key.dimensions))
        return signs.to(key.dtype).to(self._device)  # in this order: so the device has room for nothing else

    def _add(self, key: Signs, signs: Tensor) -> Tensor:
        with self._lock:
            added = self._matrices.setdefault(key, signs)
            self._matrices.move_to_end(key)
            self._evict()
            return added

    def _evict(self) -> None:
        """Of those that nobody keeps, let the ones go that were not used for longest."""
        idle = [key for key in self._matrices if key not in self._kept]
        total = sum(self._matrices[key].nbytes for key in idle)
        for number, key in enumerate(idle):
            if total <= self._max_bytes and len(idle) - number <= IDLE_MATRICES:
                return
            total -= self._matrices.pop(key).nbytes
