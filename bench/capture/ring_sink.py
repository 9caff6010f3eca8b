"""The sink that ends at the ring: a process beside the engine's takes each extent, counts its rows, and frees it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from bench.capture.sinks import Arrived, RowsMissingError
from bench.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.engine import ModelFacts
    from inference_svc.taps.plan import RowEncoding

_STOP_SECONDS = 10.0
_LINE_BYTES = 1 << 20


class RingSink:
    """The consumer of the rings, a process of its own; see `ring_consumer`."""

    knows_complete = False

    def __init__(self, facts: ModelFacts, rows_per_request: int) -> None:
        sites = ",".join(str(int(site)) for site in facts.sites)
        self._arguments = [sites, str(facts.num_layers), str(rows_per_request), *facts.control_paths]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """See `CaptureSink`."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.capture.ring_consumer", *self._arguments),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        await self._read(self._process)

    async def begin(self, prompts: Mapping[str, Sequence[int]], encoding: RowEncoding | None = None) -> None:
        """See `CaptureSink`."""
        del encoding  # the headers say it
        await self._ask({"begin": list(prompts)})

    async def complete(self, replies: Mapping[str, Sequence[int]]) -> None:
        """See `CaptureSink`: there is nothing to wait for."""

    async def finish(self, replies: Mapping[str, Sequence[int]]) -> Arrived:
        """See `CaptureSink`. The engine has been drained: every extent was counted before its Done."""
        del replies  # they are as long as they were asked to be
        counted = await self._ask({"finish": True})
        if counted["missing"] or counted["lost"]:
            raise RowsMissingError(f"rows are missing of {counted['missing']}; lost: {counted['lost'] or 'none'}")
        return Arrived(counted["rows"], counted["num_bytes"])

    async def stop(self) -> None:
        """See `CaptureSink`."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None  # noqa: S101 - it was started
        assert process.stdin is not None  # noqa: S101 - see `start`
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        return await self._read(process)

    async def _read(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None  # noqa: S101 - see `start`
        line = await process.stdout.readline()
        if not line:
            raise RowsMissingError("the consumer of the ring has ended; the log above says why")
        answer: dict[str, Any] = json.loads(line)
        return answer
