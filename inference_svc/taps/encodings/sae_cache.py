"""The encoders of sparse autoencoders in a worker. The service decides which; a thread copies them to the device."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.encodings.sae_encoder import WORKING_BYTES, SAEEncoder, load_encoder
from residuum.v1 import sae_pb2
from residuum.wire.sae import EncoderShape
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = get_logger(__name__)

_LEAVING_SECONDS = 30.0
"""How long a new encoder waits for the memory of one that was dropped. The last blocks of a capture still use it."""
_POLL_SECONDS = 0.01


class WantedSAE(NamedTuple):
    """An encoder that the service wants a worker to keep."""

    name: str
    """Its name in plans."""
    header: bytes
    """Its `SAEHeader`, serialised."""
    path: str
    """The file with its bytes; empty if the worker has them."""


def room_for_saes(max_bytes: int) -> int:
    """Return how many bytes of device memory encoders and their arithmetic take at most; 0 if there are none."""
    return max_bytes + WORKING_BYTES if max_bytes else 0


class SAECache:
    """Encoders by name. Thread-safe: the service's calls, the loading thread and the sinks' threads use it."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        """Keep up to `max_bytes` of encoders on a device."""
        self._max_bytes = max_bytes
        self._device = device
        self._lock = threading.Lock()
        self._encoders: dict[str, SAEEncoder] = {}
        self._alive: weakref.WeakSet[SAEEncoder] = weakref.WeakSet()  # also those that were dropped and are still used
        self._to_load: deque[WantedSAE] = deque()
        self._loading: str | None = None
        self._loader: threading.Thread | None = None
        self._errors: dict[str, str] = {}
        self._wanted: frozenset[str] = frozenset()

    def keep(self, wanted: Sequence[WantedSAE]) -> list[bool | str]:
        """Keep these encoders and no others. Start to load those that are missing.

        Returns:
            For each encoder, whether it is ready. If it could not be loaded, the name of the error, once; the next call
            tries again.
        """
        with self._lock:
            self._wanted = frozenset(item.name for item in wanted)
            for name in self._encoders.keys() - self._wanted:
                del self._encoders[name]
            for name in self._errors.keys() - self._wanted:
                del self._errors[name]
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
            self._alive.add(view)
        return view

    def _state(self, item: WantedSAE) -> bool | str:
        if item.name in self._encoders:
            return True
        if item.name in self._errors:
            return self._errors.pop(item.name)
        if item.name != self._loading and item not in self._to_load:
            self._to_load.append(item)
        return False

    def _run(self) -> None:
        """Load queued encoders until the queue is empty, then end the thread."""
        while (item := self._next()) is not None:
            try:
                encoder = self._load(item)
                with self._lock:
                    if item.name in self._wanted:
                        self._encoders[item.name] = encoder
                        self._alive.add(encoder)
                del encoder
            except Exception as error:  # noqa: BLE001 - `keep` reports it; other encoders may still be loaded
                _log.exception("an encoder cannot be loaded", sae=item.name)
                with self._lock:
                    self._errors[item.name] = type(error).__name__

    def _next(self) -> WantedSAE | None:
        with self._lock:
            while self._to_load:
                item = self._to_load.popleft()
                self._loading = item.name
                if item.name in self._wanted and item.name not in self._encoders:
                    return item
            self._loading = self._loader = None
            return None

    def _load(self, item: WantedSAE) -> SAEEncoder:
        shape = EncoderShape.of(sae_pb2.SAEHeader.FromString(item.header))
        self._wait_for_room(shape.nbytes)
        if self._device.type != "cuda":
            return load_encoder(Path(item.path), shape, self._device)
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            encoder = load_encoder(Path(item.path), shape, self._device)
            stream.synchronize()  # before other streams read it
        return encoder

    def _wait_for_room(self, size: int) -> None:
        """Wait until encoders that were dropped leave room for a new one.

        Raises:
            MemoryError: They do not.
        """
        deadline = time.monotonic() + _LEAVING_SECONDS
        while self._used() + size > self._max_bytes:
            if time.monotonic() > deadline:
                raise MemoryError(f"{size} bytes do not fit next to {self._used()} of {self._max_bytes}")
            time.sleep(_POLL_SECONDS)

    def _used(self) -> int:
        with self._lock:
            memories = {encoder.weights.data_ptr(): encoder.nbytes for encoder in self._alive}
        return sum(memories.values())
