"""The encoders of sparse autoencoders in a worker. The service decides which; a thread copies them to the device.

Their memory is allocated once. Otherwise torch would keep the memory of encoders that were dropped in pieces, which a
larger encoder cannot use, and a step might have to wait until torch gives them back.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.encodings.sae_encoder import SAEEncoder, load_encoder
from inference_svc.taps.encodings.work_stream import WorkStream
from residuum.v1 import sae_pb2
from residuum.wire.sae import EncoderShape
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_log = get_logger(__name__)

_LEAVING_SECONDS = 30.0
"""How long a new encoder waits for the memory of one that was dropped. The last blocks of a capture still use it."""
_POLL_SECONDS = 0.01
_ALIGNMENT = 256
"""Bytes. Every encoder begins at a multiple of this, as memory from CUDA does."""


class WantedSAE(NamedTuple):
    """An encoder that the service wants a worker to keep."""

    name: str
    """Its name in plans."""
    header: bytes
    """Its `SAEHeader`, serialised."""
    path: str
    """The file with its bytes; empty if the worker has them."""
    upload: int
    """The number of the attempt to load it. A later upload may have a file of the same path."""


class SAECache:
    """Encoders by name. Thread-safe: the service's calls, the loading thread and the sinks' threads use it."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        """Allocate the memory for `max_bytes` of encoders on a device."""
        self._memory = torch.empty(max_bytes, dtype=torch.uint8, device=device)
        self._stream = WorkStream(device)
        self._lock = threading.Lock()
        self._encoders: dict[str, SAEEncoder] = {}
        # The places in the memory, also of encoders that were dropped and are still used.
        self._places: weakref.WeakKeyDictionary[SAEEncoder, range] = weakref.WeakKeyDictionary()
        self._to_load: deque[WantedSAE] = deque()
        self._loading: WantedSAE | None = None
        self._loader: threading.Thread | None = None
        self._errors: dict[WantedSAE, str] = {}
        self._wanted: frozenset[WantedSAE] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return int(self._memory.nbytes)

    def keep(self, wanted: Sequence[WantedSAE]) -> list[bool | str]:
        """Keep these encoders and no others. Start to load those that are missing.

        Returns:
            For each encoder, whether it is ready. If it could not be loaded, the name of the error. A call with
            another number tries again. MemoryError: there is no piece of memory of its size.
        """
        with self._lock:
            self._wanted = frozenset(wanted)
            for name in self._encoders.keys() - {item.name for item in wanted}:
                del self._encoders[name]
            for item in self._errors.keys() - self._wanted:
                del self._errors[item]
            states = [self._state(item) for item in wanted]
            if self._to_load and self._loader is None:
                self._loader = threading.Thread(target=self._run, name="residuum-saes", daemon=True)
                self._loader.start()
            return states

    def get(self, name: str, chosen: tuple[int, ...] = ()) -> SAEEncoder:
        """Return an encoder that keeps the chosen features; without any, the strongest.

        Raises:
            KeyError: It is not here.
        """
        with self._lock:
            encoder = self._encoders[name]
        view = encoder.choosing(chosen)
        with self._lock:
            self._places[view] = self._places[encoder]
        return view

    def _state(self, item: WantedSAE) -> bool | str:
        if item.name in self._encoders:
            return True
        if item in self._errors:
            return self._errors[item]  # kept: this may be the call of another upload, which ignores it
        if item != self._loading and item not in self._to_load:
            self._to_load.append(item)
        return False

    def _run(self) -> None:
        """Load queued encoders until the queue is empty, then end the thread."""
        while (item := self._next()) is not None:
            try:
                self._load(item)
            except Exception as error:  # noqa: BLE001 - `keep` reports it; other encoders may still be loaded
                _log.exception("an encoder cannot be loaded", sae=item.name)
                with self._lock:
                    self._errors[item] = type(error).__name__

    def _next(self) -> WantedSAE | None:
        with self._lock:
            while self._to_load:
                self._loading = self._to_load.popleft()
                if self._loading in self._wanted and self._loading.name not in self._encoders:
                    return self._loading
            self._loading = self._loader = None
            return None

    def _load(self, item: WantedSAE) -> None:
        header = sae_pb2.SAEHeader.FromString(item.header)
        shape = EncoderShape.of(header)
        place = self._wait_for_place(shape.nbytes)
        with self._stream.used():
            encoder = load_encoder(Path(item.path), shape, header.digest, self._memory[place.start : place.stop])
        with self._lock:
            if item.name in {wanted.name for wanted in self._wanted}:
                self._encoders[item.name] = encoder
                self._places[encoder] = place

    def _wait_for_place(self, size: int) -> range:
        """Return a place for an encoder. Wait for encoders that were dropped if they leave one.

        Raises:
            MemoryError: They do not.
        """
        deadline = time.monotonic() + _LEAVING_SECONDS
        while True:
            with self._lock:
                staying = {self._places[encoder] for encoder in self._encoders.values()}
                taken = set(self._places.values())
            place = _first_gap(taken, size, self.nbytes)
            if place is not None:
                return place
            if _first_gap(staying, size, self.nbytes) is None or time.monotonic() > deadline:
                used = sum(map(len, taken))
                raise MemoryError(f"{size} bytes in one piece do not fit next to {used} of {self.nbytes} bytes")
            time.sleep(_POLL_SECONDS)


def _first_gap(taken: Iterable[range], size: int, total: int) -> range | None:
    """Return the first free place of a size in memory of `total` bytes; None if there is none."""
    start = 0
    for place in sorted(taken, key=lambda place: place.start):
        if start + size <= place.start:
            break
        start = max(start, -(-place.stop // _ALIGNMENT) * _ALIGNMENT)
    return range(start, start + size) if start + size <= total else None
