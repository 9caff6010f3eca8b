"""Runs shippers as child processes of the inference service: starts, restarts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inference_svc.shipping.credentials import to_arguments
from inference_svc.shipping.figures import Figures, read_figures
from residuum.rpc.credentials import Credentials
from svc_common.backoff import Backoff
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from typing_extensions import Self

    from inference_svc.tap_settings import TapSettings

_FIRST_DELAY_SECONDS = 0.2
_LONGEST_DELAY_SECONDS = 5.0
_STABLE_SECONDS = 30.0
"""After a run at least this long, the backoff of a shipper that ended starts again with the first delay."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ShipperStatus:
    """The state of one shipper."""

    pid: int | None
    """Its process ID; None while it is being restarted."""
    restarts: int
    """How often it was restarted."""
    figures: Figures
    """Its figures, about a second old; see `Lanes.figures`. Empty if it has no figures file."""


class ShipperSupervisor:
    """Keeps a number of shippers running.

    A shipper that ends is restarted after a delay, which grows while it keeps failing. Workers hand its items to other
    shippers in the meantime, or to its successor. No shipper outlives this process, even if this process is killed:
    each shipper watches its parent.

    Example:
        supervisor = ShipperSupervisor([directory / "stage-0"], "localhost:50052", count=2)
        await supervisor.start()
        ...                                  # stop the engine first, so that no new rows come
        await supervisor.stop(grace_seconds=10)
    """

    def __init__(
        self,
        control_paths: Sequence[str | os.PathLike[str]],
        stores: str | Sequence[str],
        count: int,
        *,
        credentials: Credentials | None = None,
        folder: str | os.PathLike[str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Prepare the shippers; `start` starts them.

        Args:
            control_paths: The control sockets of the workers. They need not exist yet.
            stores: One store or several, each as host:port or name=host:port.
            count: How many shippers to run. Each opens a stream to every store.
            credentials: The credentials for the stores.
            folder: The folder of their figures files. None: they write none.
            arguments: More arguments for each shipper; see `python -m inference_svc.shipping --help`.
        """
        controls = [word for path in control_paths for word in ("--control", os.fspath(Path(path)))]
        named = [stores] if isinstance(stores, str) else stores
        self._arguments = [
            *controls,
            *(word for store in named for word in ("--store", store)),
            *to_arguments(credentials or Credentials()),
            *arguments,
        ]
        places = [Path(folder, f"shipper{name}.figures") if folder else None for name in range(count)]
        self._keepers = [_Keeper(name, self._arguments, place) for name, place in enumerate(places)]

    @classmethod
    def from_settings(cls, settings: TapSettings, control_paths: Sequence[str], folder: str | os.PathLike[str]) -> Self:
        """Return a supervisor with the stores, the credentials and the shippers of the settings; see the class."""
        return cls(
            control_paths,
            settings.store,
            settings.shippers,
            credentials=settings.store_credentials,
            folder=folder,
            arguments=("--nice", str(settings.shipper_nice)),
        )

    async def start(self) -> None:
        """Start the shippers. Returns when their processes exist.

        Raises:
            OSError: A process cannot be started.
        """
        for keeper in self._keepers:
            await keeper.start()

    async def stop(self, grace_seconds: float) -> None:
        """Let the shippers deliver their items and end. Kill those that outlast the grace. Idempotent."""
        await asyncio.gather(*(keeper.stop(grace_seconds) for keeper in self._keepers))

    def status(self) -> list[ShipperStatus]:
        """Return the state of each shipper."""
        return [keeper.status() for keeper in self._keepers]


class _Keeper:
    """Keeps one shipper running."""

    def __init__(self, name: int, arguments: Sequence[str], figures: Path | None) -> None:
        self._name = name
        self._arguments = [*arguments, *(["--figures", str(figures)] if figures else [])]
        self._figures = figures
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._restarts = 0
        self._stopping = asyncio.Event()

    def status(self) -> ShipperStatus:
        pid = self._process.pid if self._process and self._process.returncode is None else None
        figures = read_figures(self._figures) if self._figures else {}
        return ShipperStatus(pid, self._restarts, figures)

    async def start(self) -> None:
        process = await self._spawn()
        self._task = asyncio.create_task(self._keep(process), name=f"shipper-{self._name}")

    async def stop(self, grace_seconds: float) -> None:
        self._stopping.set()
        if self._task is None:
            return
        self._signal("terminate")
        try:
            await asyncio.wait_for(asyncio.shield(self._task), grace_seconds)
        except asyncio.TimeoutError:
            _log.error("shipper killed: it outlasted the grace", shipper=self._name, grace_seconds=grace_seconds)
            self._signal("kill")
            await self._task
        except asyncio.CancelledError:
            self._signal("kill")  # the caller cannot wait, and no process may be left behind
            raise

    async def _keep(self, process: asyncio.subprocess.Process | None) -> None:
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        status: int | None = None
        while True:
            if process is not None:
                started_at = time.monotonic()
                status = await process.wait()
                if time.monotonic() - started_at >= _STABLE_SECONDS:
                    backoff.reset()
            if self._stopping.is_set():
                return
            delay = backoff.next_delay()
            _log.error("shipper ended", shipper=self._name, status=status, restart_in_seconds=round(delay, 2))
            if await self._stops_within(delay):
                return
            process = await self._respawn()

    async def _respawn(self) -> asyncio.subprocess.Process | None:
        self._restarts += 1
        try:
            return await self._spawn()
        except OSError as error:
            _log.error("shipper cannot be started", shipper=self._name, error=str(error))
            return None

    async def _stops_within(self, seconds: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference_svc.shipping",
            *self._arguments,
            "--parent-pid",
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
        )
        _log.info("shipper started", shipper=self._name, pid=self._process.pid)
        if self._stopping.is_set():
            self._signal("terminate")
        return self._process

    def _signal(self, method: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                getattr(self._process, method)()
