"""The cache of random projections' sign matrices on the device. A thread makes them, so that no step waits for it."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.taps.encodings.projections import KEPT_BYTES
from inference_svc.taps.encodings.work_stream import WorkStream
from residuum.wire.rows.projection import projection_signs
from svc_common.logs import get_logger

IDLE_BYTES, IDLE_MATRICES = 16 << 20, 16
"""Limits for matrices that the service does not keep: their size and their number."""

_log = get_logger(__name__)


class Signs(NamedTuple):
    """The key of a sign matrix."""

    seed: int
    dimensions: int
    dtype: torch.dtype


def max_sign_bytes(width: int, owners: int = 1) -> int:
    """Return an upper bound on the bytes of all matrices for rows of `width` elements.

    Each owner keeps at most its part of `KEPT_BYTES`, or one matrix. No matrix has more than `width` dimensions.
    """
    return max(KEPT_BYTES, owners * 4 * width * width) + IDLE_BYTES


class SignCache:
    """Sign matrices by key: those that requests need, and a few that were used recently. Thread-safe.

    Making a matrix takes as long as many steps, and callers choose the seeds. So the service asks for the matrices of a
    request before the request starts (`keep`), and a thread makes them. The step only looks them up.
    """

    def __init__(self, width: int, device: torch.device, max_bytes: int = IDLE_BYTES) -> None:
        """Cache matrices for rows of `width` elements. `max_bytes` limits those that are not kept."""
        self._width = width
        self._device = device
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._matrices: OrderedDict[Signs, Tensor] = OrderedDict()
        self._kept_by: dict[int, frozenset[Signs]] = {}
        self._kept: frozenset[Signs] = frozenset()  # by any owner
        self._to_make: deque[Signs] = deque()
        self._making: Signs | None = None
        self._stream = WorkStream(device)
        self._maker: threading.Thread | None = None
        self._errors: dict[Signs, str] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all cached matrices."""
        with self._lock:
            return sum(matrix.nbytes for matrix in self._matrices.values())

    def keep(self, wanted: Sequence[Signs], owner: int = 0) -> list[bool | str]:
        """Keep these matrices for an owner, and no others of its own. Start to make those that are missing.

        Returns:
            For each matrix, whether it is ready. If it could not be made, for example without memory, the name of the
            error, once; the next call tries again.
        """
        with self._lock:
            self._kept_by[owner] = frozenset(wanted)
            self._kept = frozenset().union(*self._kept_by.values())
            for key in self._errors.keys() - self._kept:
                del self._errors[key]
            states = {key: self._state(key) for key in dict.fromkeys(wanted)}
            if self._to_make and self._maker is None:
                self._maker = threading.Thread(target=self._run, name="residuum-signs", daemon=True)
                self._maker.start()
            self._evict()
            return [states[key] for key in wanted]

    def get(self, seed: int, dimensions: int, dtype: torch.dtype) -> Tensor:
        """Return the signs of a projection, 1 and -1, [width, dimensions]. Make them now if they are missing."""
        key = Signs(seed, dimensions, dtype)
        with self._lock:
            found = self._matrices.get(key)
            if found is not None:
                self._matrices.move_to_end(key)
                return found
        return self._add(key, self._make(key))

    def _state(self, key: Signs) -> bool | str:
        """Return the state of a matrix for `keep`. Queue the matrix if it is missing."""
        if key in self._matrices:
            return True
        if key in self._errors:
            return self._errors.pop(key)
        if key != self._making and key not in self._to_make:
            self._to_make.append(key)
        return False

    def _run(self) -> None:
        """Make queued matrices until the queue is empty, then end the thread."""
        while (key := self._next()) is not None:
            try:
                with self._stream.used():
                    signs = self._make(key)
                self._add(key, signs)
            except Exception as error:  # noqa: BLE001 - `keep` reports it; other matrices may still be made
                _log.exception("signs of a random projection cannot be made", seed=key.seed, dimensions=key.dimensions)
                with self._lock:
                    self._errors[key] = type(error).__name__

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
        return signs.to(key.dtype).to(self._device)  # converted first, so the device holds only the final matrix

    def _add(self, key: Signs, signs: Tensor) -> Tensor:
        with self._lock:
            added = self._matrices.setdefault(key, signs)
            self._matrices.move_to_end(key)
            self._evict()
            return added

    def _evict(self) -> None:
        """Drop matrices that are not kept, least recently used first, until the limits hold."""
        idle = [key for key in self._matrices if key not in self._kept]
        total = sum(self._matrices[key].nbytes for key in idle)
        for number, key in enumerate(idle):
            if total <= self._max_bytes and len(idle) - number <= IDLE_MATRICES:
                return
            total -= self._matrices.pop(key).nbytes
