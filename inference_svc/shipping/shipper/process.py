"""The shipper process: it connects the control sockets of workers with the lanes to the stores."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from inference_svc.shipping.figures import FigureFile
from inference_svc.shipping.shipper.control import ControlClient
from inference_svc.shipping.shipper.lanes import Lanes
from inference_svc.shipping.shipper.shared_rings import Rings
from residuum.rpc.credentials import Credentials
from residuum.wire.placement import StoreAddress
from svc_common.logs import get_logger

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TICK_SECONDS = 0.5

_log = get_logger(__name__)


@dataclass(frozen=True)
class ShipperSettings:
    """The settings of a shipper, from its command line."""

    control_paths: tuple[Path, ...]
    """The control sockets of the workers. They need not exist yet."""
    stores: tuple[StoreAddress, ...]
    """The stores, of different names."""
    max_unacked_bytes: int = 64 << 20
    """Most payload bytes that each store may leave unacknowledged."""
    ack_timeout_seconds: float = 30.0
    """After this long without a due acknowledgement, the shipper opens a new connection to the store."""
    grace_seconds: float = 10.0
    """How long the shipper goes on delivering after SIGTERM, or after its parent has ended."""
    parent_pid: int | None = None
    """The process that started the shipper. The shipper ends when it ends. None: the shipper watches no process."""
    credentials: Credentials = field(default_factory=Credentials)
    """The credentials for the stores."""
    figures_path: Path | None = None
    """The file for the shipper's figures. None: it keeps none."""


class Shipper:
    """A shipper process.

    It stops on SIGTERM or SIGINT, or when its parent has ended: it tells the workers that it leaves, delivers its
    items, and ends, at the latest after the grace. A worker that still runs hands undelivered items to another shipper.
    """

    def __init__(self, settings: ShipperSettings) -> None:
        """Prepare the shipper; `run` connects it."""
        self._settings = settings
        rings = Rings()
        self._lanes = Lanes(settings.stores, settings.max_unacked_bytes, settings.credentials, rings)
        path = settings.figures_path
        self._file = FigureFile(path, self._lanes.figures) if path else None
        self._clients = [ControlClient(path, self._lanes.put, rings) for path in settings.control_paths]

    def run(self) -> int:
        """Ship until a signal or the end of the parent stops the process.

        Returns:
            The exit status: 0 if all items were delivered, 1 otherwise.
        """
        signals = _signal_socket()
        self._lanes.start()
        for client in self._clients:
            client.start()
        _log.info("shipper started", stores=[str(store) for store in self._settings.stores], workers=len(self._clients))
        return self._stop(self._watch(signals))

    def _watch(self, signals: socket.socket) -> str:
        """Wait for a reason to stop and return it. Check the progress of the streams in the meantime."""
        while True:
            with contextlib.suppress(TimeoutError):
                return signal.Signals(signals.recv(1)[0]).name
            if self._settings.parent_pid not in (None, os.getppid()):
                return "the parent has ended"
            if not (self._lanes.are_alive() and all(client.is_alive() for client in self._clients)):
                return "a thread failed"
            self._check_progress()

    def _check_progress(self) -> None:
        self._lanes.check_progress(self._settings.ack_timeout_seconds)
        if self._file:
            self._file.refresh()

    def _stop(self, why: str) -> int:
        _log.info("shipper stopping", why=why)
        for client in self._clients:
            client.leave()
        self._lanes.close()
        self._deliver()
        undelivered = self._lanes.abandon()
        for client in self._clients:
            client.close()
        self._lanes.wait(_TICK_SECONDS)
        figures = [lane.figures() for lane in self._lanes]
        log = _log.error if undelivered else _log.info
        log(
            "shipper stopped",
            undelivered=undelivered,
            settled=sum(item["settled"] for item in figures),
            rejected=sum(item["rejected"] for item in figures),
        )
        return 1 if undelivered else 0

    def _deliver(self) -> None:
        """Wait until everything is delivered, or the grace is over."""
        end = time.monotonic() + self._settings.grace_seconds
        while not self._lanes.wait(min(_TICK_SECONDS, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return
            self._check_progress()


def _signal_socket() -> socket.socket:
    """Return a socket that delivers the number of each signal as one byte.

    Python writes the number no matter which thread the system interrupts. So no code has to run in a signal handler,
    which could interrupt any other code.
    """
    receiver, sender = socket.socketpair()
    receiver.settimeout(_TICK_SECONDS)
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach())
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    return receiver
