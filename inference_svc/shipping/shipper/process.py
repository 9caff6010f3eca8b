"""The shipper process: from the control sockets of workers to one stream to each store."""

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
from residuum.rpc.credentials import Credentials
from residuum.wire.placement import StoreAddress
from svc_common.logs import get_logger

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TICK_SECONDS = 0.5

_log = get_logger(__name__)


@dataclass(frozen=True)
class ShipperSettings:
    """What a shipper is told on its command line."""

    control_paths: tuple[Path, ...]
    """The control sockets of the workers. They need not exist yet."""
    stores: tuple[StoreAddress, ...]
    """The stores, of different names."""
    max_unacked_bytes: int = 64 << 20
    """Payload that may be under way to each store without an acknowledgement."""
    ack_timeout_seconds: float = 30.0
    """A store that owes an acknowledgement and gives none for this long is tried on a new connection."""
    grace_seconds: float = 10.0
    """After SIGTERM, or when the parent is gone: how long to go on delivering what was handed over."""
    parent_pid: int | None = None
    """The process that started this one: without it, the shipper ends. None: it may live alone."""
    credentials: Credentials = field(default_factory=Credentials)
    """What the stores are shown."""
    figures_path: Path | None = None
    """Where to keep figures of this process. None: nowhere."""


class Shipper:
    """Everything of a shipper process.

    It ends on SIGTERM or SIGINT, and when its parent is gone: it tells the workers that it leaves, delivers what it
    has, and goes, at the latest after the grace. What it could not deliver a living worker hands to another shipper.
    """

    def __init__(self, settings: ShipperSettings) -> None:
        """Prepare; nothing is connected before `run`."""
        self._settings = settings
        self._lanes = Lanes(settings.stores, settings.max_unacked_bytes, settings.credentials)
        path = settings.figures_path
        self._file = FigureFile(path, self._lanes.figures) if path else None
        self._clients = [ControlClient(path, self._lanes.put) for path in settings.control_paths]

    def run(self) -> int:
        """Ship until told to stop.

        Returns:
            The exit status: 0 if all that was handed over was delivered.
        """
        signals = _signal_socket()
        self._lanes.start()
        for client in self._clients:
            client.start()
        _log.info("shipper started", stores=[str(store) for store in self._settings.stores], workers=len(self._clients))
        return self._stop(self._watch(signals))

    def _watch(self, signals: socket.socket) -> str:
        """Wait for a reason to stop, and keep an eye on the stream; return the reason."""
        while True:
            with contextlib.suppress(TimeoutError):
                return signal.Signals(signals.recv(1)[0]).name
            if self._settings.parent_pid not in (None, os.getppid()):
                return "the parent is gone"
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
        """Go on until all is delivered, or the grace is over."""
        end = time.monotonic() + self._settings.grace_seconds
        while not self._lanes.wait(min(_TICK_SECONDS, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return
            self._check_progress()


def _signal_socket() -> socket.socket:
    """Return a socket from which the number of each signal can be read, as it comes.

    Python writes it there whichever thread the system hands the signal to, some library's among them, and nothing has
    to run in a handler, in the middle of who knows what.
    """
    receiver, sender = socket.socketpair()
    receiver.settimeout(_TICK_SECONDS)
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach())
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    return receiver
