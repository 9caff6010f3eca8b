"""Calls to the workers of an engine: to those of every replica, or of one.

With data parallelism, vLLM runs several replicas of the model. `AsyncLLM.collective_rpc` reaches all of them, but
returns only what the first one answers. So these calls go to vLLM's client of the replicas, one for each replica. They
rely on names of vLLM 0.32. An engine of one replica is called by `collective_rpc`, in every version.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import vllm

from inference_svc.taps.errors import UnsupportedEngineError
from inference_svc.taps.vllm.missing_names import refuse_missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.engine.async_llm import AsyncLLM

_NAMES = ("core_engines", "_call_utility_async")


class Replicas:
    """All replicas of an engine, or one of them."""

    def __init__(self, llm: AsyncLLM, count: int, chosen: int | None = None) -> None:
        """Call the replicas of an engine.

        Args:
            llm: The engine.
            count: How many replicas it has.
            chosen: The replica to call; None: all of them.
        """
        self._llm = llm
        self._count = count
        self.chosen = chosen
        """The replica that is called; None: all of them."""

    def check(self) -> None:
        """Check that each replica can be called.

        Raises:
            IncompatibleEngineError: This version of vLLM lacks a name that the calls use.
            UnsupportedEngineError: Other services have some of the replicas.
        """
        if self._count == 1:
            return
        client: Any = self._llm.engine_core
        refuse_missing(client, vllm.__version__, [name for name in _NAMES if not hasattr(client, name)])
        if len(client.core_engines) != self._count:
            raise UnsupportedEngineError(
                f"The engine runs {len(client.core_engines)} of {self._count} replicas, but one service has to run "
                "all of them. Of vLLM's arguments for data parallelism, give only data_parallel_size."
            )

    def each(self) -> list[Replicas]:
        """Return every replica by itself."""
        if self._count == 1:
            return [self]
        return [Replicas(self._llm, self._count, index) for index in range(self._count)]

    async def call(self, method: str, arguments: Sequence[object] = ()) -> list[list[Any]]:
        """Call a method of the workers.

        Returns:
            For each replica that is called, the answers of its workers.

        Raises:
            EngineDeadError: The engine is dead.
        """
        if self._count == 1:
            return [await self._llm.collective_rpc(method, args=tuple(arguments))]
        client: Any = self._llm.engine_core
        chosen = client.core_engines if self.chosen is None else [client.core_engines[self.chosen]]
        # The arguments of the engine's `collective_rpc`: the method, its timeout, arguments and keyword arguments.
        call = ("collective_rpc", method, None, tuple(arguments), None)
        return list(
            await asyncio.gather(
                *(client._call_utility_async(*call, engine=engine) for engine in chosen)  # noqa: SLF001 - none is public
            )
        )
