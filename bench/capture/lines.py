"""A helper process that is asked in lines of JSON: one question a line in, one answer a line out."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from bench.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

_STOP_SECONDS = 10.0
_LINE_BYTES = 1 << 20


class HelperDiedError(RuntimeError):
    """A helper process has ended before it answered; its log says why."""


class LineProcess:
    """`python -m module arguments...`, which says one line when it is ready, and ends when its input does."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        """Wrap a running process; see `start`."""
        self._process = process
        self._name = name

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str]) -> LineProcess:
        """Start it, and wait until it is ready.

        Raises:
            HelperDiedError: It ended.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        started = cls(process, module)
        await started._read()
        return started

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return its answer to a question.

        Raises:
            HelperDiedError: It ended.
        """
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101 - see `start`
        try:
            pipe.write(json.dumps(question).encode() + b"\n")
            await pipe.drain()
        except ConnectionError:
            raise self._died() from None
        return await self._read()

    async def stop(self) -> None:
        """End it; by force if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except asyncio.TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it by force."""
        self._process.kill()
        await self._process.wait()

    async def _read(self) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101 - see `start`
        line = await pipe.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> HelperDiedError:
        return HelperDiedError(f"{self._name} has ended; the log above says why")
