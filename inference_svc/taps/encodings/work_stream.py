"""The CUDA stream of a thread that prepares something for later steps."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class WorkStream:
    """A stream that is made once and used by one thread at a time.

    torch keeps the memory that a stream allocated and freed for this stream. So a stream for each piece of work would
    keep memory that nothing can use any more.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream at its first use."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Work on the stream if the device is a GPU. When the context ends, other streams can use the results."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()
