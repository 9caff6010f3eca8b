"""Starts the front end of an API server: checks the workers' taps, starts the shippers and runs the self-test."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_svc.engine.ranks import check_answers, check_ranks
from inference_svc.selftest import run_self_test
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from inference_svc.engine.engine import Engine
    from inference_svc.tap_settings import TapSettings
    from inference_svc.vllm_serve.delivery import Delivery

    Generate = Callable[..., AsyncGenerator[Any]]

_log = get_logger(__name__)

_RESULT = "startup"
"""The file, in the folder of the control sockets, in which the first API server says why its start failed; empty if it
did not fail."""
_POLL_SECONDS = 0.1


class UntappedLLM:
    """An AsyncLLM with vLLM's original `generate`. The self-test needs it, because it makes its own plans."""

    def __init__(self, llm: Any, generate: Generate) -> None:
        """Wrap an AsyncLLM; `generate` replaces its method of that name."""
        self._llm = llm
        self.generate = generate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


class Startup:
    """Starts the front end of one API server: immediately if an event loop runs, otherwise with the first request."""

    def __init__(
        self,
        llm: Any,
        settings: TapSettings,
        delivery: Delivery | None,
        serve: Callable[[Sequence[dict[str, Any]]], Engine],
        *,
        is_first: bool,
    ) -> None:
        """Begin to start, if an event loop runs.

        Args:
            llm: The AsyncLLM.
            settings: The settings.
            delivery: The stores and shippers; None without a store.
            serve: Called with the descriptions of the ranks. Returns the engine.
            is_first: Whether this API server starts the shippers and runs the self-test for all API servers.
        """
        self._llm = llm
        self._serve = serve
        self._settings = settings
        self._delivery = delivery
        self._is_first = is_first
        self._folders: set[Path] = set()
        self._task: asyncio.Task[None] | None = None
        with suppress(RuntimeError):  # no event loop runs yet
            self._task = self._begin()

    async def wait(self) -> None:
        """Wait until the server can capture and steer.

        Raises:
            Failure: The start failed.
        """
        if self._task is None:
            self._task = self._begin()
        await asyncio.shield(self._task)

    def check(self) -> None:
        """Refuse a request before its answer begins, if the start has already failed.

        Raises:
            Failure: The start failed.
        """
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def clean_up(self) -> None:
        """Remove the folders of the workers' control sockets."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _begin(self) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._start())
        # A failure is logged where it happens. Otherwise asyncio would log it again if no request asks for it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _start(self) -> None:
        with _startup_failure("not every layer is known to be tapped"):
            ranks = await self._llm.collective_rpc("residuum_describe")
            check_answers("residuum_describe", [ranks])
            check_ranks(ranks, self._llm.vllm_config.model_config.get_total_num_hidden_layers())
        engine = self._serve(ranks)
        result = folder_of(ranks) / _RESULT
        if self._is_first:
            controls = [rank["control_path"] for rank in ranks if rank["control_path"]]
            await self._start_for_all(engine, controls, result)
        else:
            await _hear(result)
        _log.info(
            "residuum is ready",
            model=engine.facts.name,
            sites=[capture_pb2.Site.Name(site) for site in engine.facts.sites],
            stores=[str(store) for store in self._settings.stores],
            ring_bytes=sum(rank["ring_bytes"] for rank in ranks),
        )

    async def _start_for_all(self, engine: Engine, controls: Sequence[str], result: Path) -> None:
        """Start what all API servers share, and tell the others whether it failed."""
        error = "The first API server process stopped before its self-test had ended. Start vLLM again."
        try:
            await self._start_once(engine, controls)
            error = ""
        except Failure as failure:
            error = failure.message
            raise
        finally:
            with suppress(OSError):  # the folder is gone if vLLM is stopping
                written = result.with_suffix(".new")
                written.write_text(error)
                written.rename(result)

    async def _start_once(self, engine: Engine, controls: Sequence[str]) -> None:
        self._folders = {Path(control).parent for control in controls}
        if self._delivery is not None:
            with _startup_failure("its shippers cannot be started"):
                await self._delivery.ship(controls)
        with _startup_failure("its self-test failed"):
            await run_self_test(engine)


def folder_of(ranks: Sequence[dict[str, Any]]) -> Path:
    """Return a folder that all API servers know, from the descriptions of the ranks: that of the control sockets."""
    return Path(next(rank["control_path"] for rank in ranks if rank["control_path"])).parent


async def _hear(result: Path) -> None:
    """Wait until the first API server has started what all share.

    Raises:
        Failure: It failed.
    """
    while (error := _read(result)) is None:  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(_POLL_SECONDS)
    if error:
        _log.error("nothing can be captured or steered", cause=error)
        raise Failure(Reason.ERROR_REASON_INTERNAL, error)


def _read(result: Path) -> str | None:
    """Return what the first API server wrote; None before it has."""
    return result.read_text() if result.exists() else None


@contextmanager
def _startup_failure(what: str) -> Iterator[None]:
    """Log an error of the start, and raise the failure that later requests get."""
    try:
        yield
    except Exception as error:
        _log.exception("nothing can be captured or steered", what=what, cause=str(error))
        raise Failure(
            Reason.ERROR_REASON_INTERNAL,
            f"This server can neither capture nor steer, because {what}: {str(error).rstrip('.')}. Its log "
            "says more. Requests that ask for neither are served.",
        ) from error
