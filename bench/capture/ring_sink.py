"""The sink that ends at the ring: a process beside the engine's takes each extent, counts its rows, and frees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.capture.lines import LineProcess
from bench.capture.sinks import Arrived, RowsMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.engine.facts import ModelFacts
    from inference_svc.taps.plan import RowEncoding


class RingSink:
    """The consumer of the rings, a process of its own; see `ring_consumer`."""

    knows_complete = False

    def __init__(self, facts: ModelFacts, rows_per_request: int, layers: Sequence[int]) -> None:
        """Expect rows of some layers."""
        sites = ",".join(str(int(site)) for site in facts.sites)
        self._arguments = [sites, ",".join(map(str, layers)), str(rows_per_request), *facts.control_paths]
        self._consumer: LineProcess | None = None

    async def start(self) -> None:
        """See `CaptureSink`."""
        self._consumer = await LineProcess.start("bench.capture.ring_consumer", self._arguments)

    async def begin(self, prompts: Mapping[str, Sequence[int]], encoding: RowEncoding | None = None) -> None:
        """See `CaptureSink`."""
        del encoding  # the headers say it
        await self._running.ask({"begin": list(prompts)})

    async def complete(self, replies: Mapping[str, Sequence[int]]) -> None:
        """See `CaptureSink`: there is nothing to wait for."""

    async def finish(self, replies: Mapping[str, Sequence[int]]) -> Arrived:
        """See `CaptureSink`. The engine has been drained: every extent was counted before its Done."""
        del replies  # they are as long as they were asked to be
        counted = await self._running.ask({"finish": True})
        if counted["missing"] or counted["lost"]:
            raise RowsMissingError(f"rows are missing of {counted['missing']}; lost: {counted['lost'] or 'none'}")
        return Arrived(counted["rows"], counted["num_bytes"])

    async def stop(self) -> None:
        """See `CaptureSink`."""
        if self._consumer:
            await self._consumer.stop()

    @property
    def _running(self) -> LineProcess:
        assert self._consumer is not None  # noqa: S101 - it was started
        return self._consumer
