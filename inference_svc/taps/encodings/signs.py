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

CACHE_BYTES = 256 << 20
"""What the matrices that nobody asked to keep take at most; one always is there."""


class Signs(NamedTuple):
    """Which matrix."""

    seed: int
    dimensions: int
    dtype: torch.dtype


class SignCache:
    """Matrices by what they are of: those that requests need, and beside them the ones that were used last.

    To make one takes as long as many steps, and callers choose the seeds. So those that requests need are asked for
    before the requests come (`keep`), and a thread makes them: the step only looks them up. Safe for threads.
    """

    def __init__(self, width: int, device: torch.device, max_bytes: int = CACHE_BYTES) -> None:
        """Keep matrices for rows of `width` elements; no more than so many bytes of those that were not asked for."""
        self._width = width
        self._device = device
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._matrices: OrderedDict[Signs, Tensor] = OrderedDict()
        self._kept: frozenset[Signs] = frozenset()
        self._to_make: deque[Signs] = deque()
        self._maker: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that are there."""
        with self._lock:
            return sum(matrix.nbytes for matrix in self._matrices.values())

    def keep(self, wanted: Sequence[Signs]) -> list[bool]:
        """Have matrices made that are not there, and keep them until this is called without them.

        Returns:
            Of each whether it is there by now.

        Raises:
            Exception: One could not be made, for want of memory for example.
        """
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                self._to_make.clear()
                raise error
            self._kept = frozenset(wanted)
            self._to_make.extend(key for key in wanted if key not in self._matrices and key not in self._to_make)
            if self._to_make and self._maker is None:
                self._maker = threading.Thread(target=self._run, name="residuum-signs", daemon=True)
                self._maker.start()
            self._evict(0)
            return [key in self._matrices for key in wanted]

    def get(self, seed: int, dimensions: int, dtype: torch.dtype) -> Tensor:
        """Return the signs of a projection, 1 and -1, [width, dimensions]; made now if nobody has asked for them."""
        key = Signs(seed, dimensions, dtype)
        with self._lock:
            found = self._matrices.get(key)
            if found is not None:
                self._matrices.move_to_end(key)
                return found
        return self._add(key, self._make(key))

    def _run(self) -> None:
        """Make what is asked for; the thread ends when nothing is left."""
        try:
            with self._own_stream() as stream:
                while (key := self._next()) is not None:
                    signs = self._make(key)
                    if stream is not None:
                        stream.synchronize()  # others look it up on streams of their own
                    self._add(key, signs)
        except Exception as error:  # noqa: BLE001 - raised again where somebody waits for what was to be made
            with self._lock:
                self._error, self._maker = error, None

    @contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Work on a stream of one's own, if the device has streams."""
        if self._device.type != "cuda":
            yield None
            return
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield stream

    def _next(self) -> Signs | None:
        with self._lock:
            while self._to_make:
                key = self._to_make.popleft()
                if key in self._kept and key not in self._matrices:
                    return key
            self._maker = None
            return None

    def _make(self, key: Signs) -> Tensor:
        signs = torch.from_numpy(projection_signs(key.seed, self._width, key.dimensions))
        return signs.to(self._device).to(key.dtype)

    def _add(self, key: Signs, signs: Tensor) -> Tensor:
        with self._lock:
            added = self._matrices.setdefault(key, signs)
            self._matrices.move_to_end(key)
            self._evict(1)
            return added

    def _evict(self, spared: int) -> None:
        """Let those go that were not used for longest and that nobody keeps, but for the last `spared`."""
        idle = [key for key in self._matrices if key not in self._kept]
        total = sum(self._matrices[key].nbytes for key in idle)
        for key in idle[: len(idle) - spared]:
            if total <= self._max_bytes:
                return
            total -= self._matrices.pop(key).nbytes
