"""What every peer can be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.capture.subjects import Batch

Array = npt.NDArray[Any]


class PeerUnavailableError(RuntimeError):
    """A peer cannot run here. The message says why."""


class Peer(Protocol):
    """A system that generates, captures every token at some layers, and hands over what it captured."""

    num_layers: int
    vocab_size: int
    model_runner: str
    """Which of vLLM's model runners runs it; "none" without vLLM."""
    device: str

    async def generate(self, prompts: Mapping[str, Sequence[int]]) -> Batch:
        """Generate for all prompts at once; each reply exactly as long as the workload says."""

    async def fetch(self, names: Sequence[str]) -> list[list[Array]]:
        """Hand over what was captured of requests, and forget it.

        Returns:
            Of each request an array for each captured layer, or one for all of them: [..., positions, hidden].
        """

    async def synchronise(self) -> None:
        """Wait until the device has nothing left to do."""

    def shutdown(self) -> None:
        """Stop its processes."""
