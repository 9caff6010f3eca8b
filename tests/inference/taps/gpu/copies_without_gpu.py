"""Copies of `host_copies` without a GPU: its device is the host, and a copy is done when it is queued."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from inference_svc.taps.gpu import host_copies


class Event:
    """An event of a stream on which all work is done at once."""

    def __init__(self, *, blocking: bool = False) -> None:
        """Take the arguments of torch's event."""

    def record(self, stream: object = None) -> None:
        """See torch's event."""

    def synchronize(self) -> None:
        """See torch's event."""


def queue_lines(lines: host_copies.Lines, stream: int) -> None:
    """Copy now."""
    del stream
    for line in range(lines.height):
        ctypes.memmove(lines.target + line * lines.width, lines.source + line * lines.pitch, lines.width)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Replace the driver and torch's streams and events."""
    stream = SimpleNamespace(cuda_stream=0)
    torch = SimpleNamespace(cuda=SimpleNamespace(Event=Event, current_stream=lambda: stream))
    with mock.patch.multiple(host_copies, queue_lines=queue_lines, torch=torch):
        yield
