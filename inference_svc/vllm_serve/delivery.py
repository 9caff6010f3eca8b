"""Runs the stores' client and the shippers of a `vllm serve`, in a thread with its own event loop.

vLLM stops its engine in a synchronous function, in some versions on the event loop that serves HTTP, so nothing can be
awaited there. On the loop of this thread, captures can still be sealed meanwhile, and the shippers stop in order.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_svc.captures.stores import Stores
from inference_svc.shipping.supervisor import ShipperSupervisor
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from concurrent.futures import Future

    from inference_svc.tap_settings import TapSettings
    from residuum.v1 import store_pb2

_log = get_logger(__name__)

_SEAL_SECONDS = 5.0
_STOP_SECONDS = 8.0
"""More than the 6 seconds for which a store keeps early rows of a capture that is never opened. Rows of other captures
may wait behind them."""


class Delivery:
    """Opens and seals captures, and keeps the shippers running."""

    def __init__(self, settings: TapSettings) -> None:
        """Start the thread. Connections to the stores open when they are first used."""
        self._settings = settings
        self._shippers: ShipperSupervisor | None = None
        self._is_closed = False
        # Not a uvloop loop: uvloop can start processes only on the main thread.
        self._loop = asyncio.SelectorEventLoop()
        threading.Thread(target=self._loop.run_forever, name="residuum-delivery", daemon=True).start()
        self._stores: Stores = self._call(self._connect()).result()

    async def ship(self, control_paths: Sequence[str]) -> None:
        """Start the shippers.

        Raises:
            OSError: A shipper process cannot be started.
        """
        await asyncio.wrap_future(self._call(self._start_shippers(control_paths)))

    def takes_early_rows(self, capture_id: str, *, is_new_id: bool, if_exists: capture_pb2.IfExists.ValueType) -> bool:
        """Return whether rows of a capture may be sent before it is opened; see `Stores.takes_early_rows`."""
        return self._stores.takes_early_rows(capture_id, is_new_id=is_new_id, if_exists=if_exists)

    def open(
        self,
        description: capture_pb2.CaptureDescription,
        *,
        is_new_id: bool,
        if_exists: capture_pb2.IfExists.ValueType = capture_pb2.IF_EXISTS_FAIL,
        on_queued: Callable[[], object] = lambda: None,
    ) -> asyncio.Future[capture_pb2.CaptureManifest | None]:
        """Create a capture; see `Stores.open`. The thread gets it before this returns, so before any later seal."""
        here = asyncio.get_running_loop()
        if self._is_closed:
            refused = here.create_future()
            refused.set_exception(
                Failure(
                    Reason.ERROR_REASON_STORE_UNREACHABLE,
                    "The server is stopping, so it opens no more captures. Send the request to another one.",
                    endpoint="",
                )
            )
            return refused
        queued = partial(here.call_soon_threadsafe, on_queued)
        opening = self._call(self._stores.open(description, is_new_id=is_new_id, if_exists=if_exists, on_queued=queued))
        return asyncio.wrap_future(opening)

    def seal(
        self,
        request: store_pb2.SealCaptureRequest,
        complete: Callable[[store_pb2.SealCaptureRequest], Awaitable[None]] | None = None,
    ) -> None:
        """Seal a capture; see `Stores.seal`. After `close_stores`, the seal is only logged as lost."""
        if self._is_closed:
            _log.error("capture not sealed: the server is stopping", request_id=request.capture_id)
            return
        self._loop.call_soon_threadsafe(self._stores.seal, request, complete)

    def close_stores(self) -> None:
        """Wait up to 5 seconds until the stores have answered all seals. Seals that they did not answer are logged."""
        self._is_closed = True
        self._wait(self._stores.close(_SEAL_SECONDS), _SEAL_SECONDS)

    def close(self) -> None:
        """Give the shippers up to 8 seconds to deliver their rows, then stop them and the thread."""
        if self._shippers is not None:
            self._wait(self._shippers.stop(_STOP_SECONDS), _STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _connect(self) -> Stores:  # gRPC channels belong to the event loop that creates them
        return Stores.from_settings(self._settings)

    async def _start_shippers(self, control_paths: Sequence[str]) -> None:
        folder = Path(control_paths[0]).parent
        self._shippers = ShipperSupervisor.from_settings(self._settings, control_paths, folder)
        await self._shippers.start()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        try:
            self._call(work).result(seconds + 1)
        except Exception:  # noqa: BLE001 - logged; the rest of the shutdown must still run
            _log.exception("rows or seals may not have reached the store")
