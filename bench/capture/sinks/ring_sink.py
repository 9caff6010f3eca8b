"""The destination for rows that end at the ring: `ring_consumer`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bench.capture.sinks.sink import Arrived, RowsMissingError
from bench.processes import Helper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.model_facts import ModelFacts
    from inference_svc.taps.plan import RowEncoding


class RingSink:
    """Consumes the rings in a separate process, which counts the rows of each extent and frees it.

    See `ring_consumer`.
    """

    knows_complete = False

    def __init__(self, facts: ModelFacts, rows_per_request: int, layers: Sequence[int]) -> None:
        """Expect rows of some layers."""
        sites = ",".join(str(int(site)) for site in facts.sites)
        self._arguments = [sites, ",".join(map(str, layers)), str(rows_per_request), *facts.control_paths]
        self._consumer: Helper | None = None

    async def start(self) -> None:
        """See `CaptureSink`."""
        self._consumer = await asyncio.to_thread(Helper, "bench.capture.sinks.ring_consumer", self._arguments)

    async def begin(self, prompts: Mapping[str, Sequence[int]], encoding: RowEncoding | None = None) -> None:
        """See `CaptureSink`."""
        del encoding  # the headers of the extents have it
        await self._ask({"begin": list(prompts)})

    async def complete(self, replies: Mapping[str, Sequence[int]]) -> None:
        """See `CaptureSink`. There is nothing to wait for."""

    async def finish(self, replies: Mapping[str, Sequence[int]]) -> Arrived:
        """See `CaptureSink`. The engine has been drained: every extent was counted before its Done."""
        del replies  # their lengths were checked already
        counted = await self._ask({"finish": True})
        if counted["missing"] or counted["lost"]:
            raise RowsMissingError(f"rows are missing of {counted['missing']}; lost: {counted['lost'] or 'none'}")
        return Arrived(counted["rows"], counted["num_bytes"])

    async def stop(self) -> None:
        """See `CaptureSink`."""
        if self._consumer:
            await asyncio.to_thread(self._consumer.stop)

    async def _ask(self, request: dict[str, Any]) -> Any:
        assert self._consumer is not None  # noqa: S101 - it was started
        return await asyncio.to_thread(self._consumer.call, request)
