"""Capture blocks: memory on the device that requests fill 32 positions at a time, as attention fills KV pages."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from residuum.wire.limits import BLOCK_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from inference_svc.taps.plan import Capture


class PoolExhaustedError(RuntimeError):
    """More blocks were asked for than one step can need: the pool was sized wrong."""


@dataclass
class Block:
    """A block that one request is filling."""

    index: int
    """Where it lies in the pool."""
    capture: Capture
    """What fills it."""
    positions: list[int] = field(default_factory=list)
    """The positions it holds, in the order of its rows; at most 32."""

    @property
    def free(self) -> int:
        """How many more positions fit."""
        return BLOCK_TOKENS - len(self.positions)


class BlockPool:
    """The memory of all blocks: [blocks, layers, 32, hidden] in the model's dtype, allotted once."""

    def __init__(self, blocks: int, layers: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory: Tensor = torch.zeros(blocks, layers, BLOCK_TOKENS, hidden, dtype=dtype, device=device)
        self._free = list(range(blocks - 1, -1, -1))
        self._changed = threading.Condition()
        self._leaving = 0
        self._failed = False

    @staticmethod
    def blocks_needed(step_tokens: int, requests: int, steps_leaving: int = 0) -> int:
        """Return how many blocks the worst step needs.

        Args:
            step_tokens: Tokens that one step computes at most.
            requests: Requests that run at once at most.
            steps_leaving: Steps whose blocks may still be on their way out.

        A step fills step_tokens / 32 blocks, and each request may leave two of them part full: one at the end of its
        prompt, and one in generation.
        """
        return (1 + steps_leaving) * (-(-step_tokens // BLOCK_TOKENS) + requests) + requests

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.memory[0].nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return int(self.memory.nbytes)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody fills."""
        return len(self._free)

    def take(self, capture: Capture) -> Block:
        """Allot a block; waits while all are on their way out.

        Raises:
            PoolExhaustedError: There is none left, and none will come back.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self._leaving or self._failed)
            if not self._free:
                raise PoolExhaustedError(
                    "captured rows cannot leave the device; see the log above"
                    if self._failed
                    else "no capture block is left; the pool is too small for this step"
                )
            return Block(self._free.pop(), capture)

    def leaving(self, count: int) -> None:
        """Note that blocks will be given back by another thread."""
        with self._changed:
            self._leaving += count

    def give_back(self, block: Block) -> None:
        """Return a block whose rows have been copied out."""
        with self._changed:
            self._free.append(block.index)
            self._leaving = max(self._leaving - 1, 0)
            self._changed.notify()

    def fail(self) -> None:
        """Note that blocks on their way out will not come back."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()
