"""Capture blocks: memory on the device that requests fill position by position, as attention fills KV pages."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from inference_svc.resources.free_runs import FreeRuns
from inference_svc.taps.element_types import WIRE_TYPES
from residuum.wire.limits import BLOCK_TOKENS, MAX_CHUNK_POSITIONS, TARGET_CHUNK_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from inference_svc.taps.plan import Capture


class PoolExhaustedError(RuntimeError):
    """More was asked for than one step can need: the pool was sized wrong."""


@dataclass
class Block:
    """A block that one request is filling: rows [units, capacity] of the pool, a unit for each site and layer."""

    first_row: int
    """The pool's row that takes the first unit of the first position."""
    capacity: int
    """How many positions fit: from one unit's row of a position to the next unit's."""
    capture: Capture
    """What fills it."""
    positions: list[int] = field(default_factory=list)
    """The positions it holds, in the order of its rows."""

    @property
    def free(self) -> int:
        """How many more positions fit."""
        return self.capacity - len(self.positions)

    @property
    def num_rows(self) -> int:
        """Rows of the pool that it takes."""
        return self.capture.units * self.capacity


class BlockPool:
    """The memory of all blocks: [rows, hidden] in the model's dtype, allotted once.

    A block takes the rows of what its capture asks for and no more. Blocks for generated tokens hold 32 positions and
    fill slowly; they are taken from the end of the pool. Those for a prompt hold what one step computes, leave when
    that step is done, and are taken from the start: so the two do not fragment each other's room.
    """

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, largest_block: int) -> None:
        """Allot the memory.

        Args:
            rows: Rows of the pool; see `rows_needed`.
            hidden: Elements of a row.
            dtype: The model's.
            device: The model's.
            largest_block: Rows that a block may take, if it holds more positions than it must: what fits the ring well.
        """
        self.memory: Tensor = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self._runs = FreeRuns(rows)
        self._wire_type = WIRE_TYPES[dtype]
        self._largest_block = largest_block
        self._changed = threading.Condition()
        self._leaving = 0
        self._failed = False

    @staticmethod
    def rows_needed(step_tokens: int, requests: int, units: int, steps_leaving: int = 0) -> int:
        """Return how many rows the worst step needs.

        Args:
            step_tokens: Tokens that one step computes at most.
            requests: Requests that run at once at most.
            units: Rows of a captured position at most: sites times layers.
            steps_leaving: Steps whose blocks may still be on their way out.

        A step fills step_tokens / 32 blocks of 32 positions, and each request may leave two of them part full: one at
        the end of its prompt, and one in generation.
        """
        blocks = (1 + steps_leaving) * (-(-step_tokens // BLOCK_TOKENS) + requests) + requests
        return blocks * BLOCK_TOKENS * units

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.memory.shape[1] * self.memory.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.memory.nbytes)

    @property
    def free_rows(self) -> int:
        """Rows of no block."""
        with self._changed:
            return self._runs.total

    def rows(self, block: Block) -> Tensor:
        """Return what a block holds, where it lies: [units, positions, hidden]."""
        whole = self.memory[block.first_row : block.first_row + block.num_rows]
        return whole.view(block.capture.units, block.capacity, -1)[:, : len(block.positions)]

    def take(self, capture: Capture, positions: int, least: int = BLOCK_TOKENS) -> Block:
        """Allot a block; waits while the room for it is on its way out.

        Args:
            capture: What will fill it.
            positions: How many positions are at hand; the block may hold fewer.
            least: How many it holds at least, 32 or fewer.

        Raises:
            PoolExhaustedError: There is no room, and none will come back.
        """
        capacities = sorted({least, max(least, min(positions, self._most_positions(capture)))}, reverse=True)
        with self._changed:
            while True:
                if self._failed:
                    raise PoolExhaustedError("captured rows cannot leave the device; see the log above")
                for capacity in capacities:
                    first = self._runs.take(capacity * capture.units, from_end=capacity <= BLOCK_TOKENS)
                    if first is not None:
                        return Block(first, capacity, capture)
                if not self._leaving:
                    raise PoolExhaustedError("no room is left for captured rows; the pool is too small for this step")
                self._changed.wait()

    def _most_positions(self, capture: Capture) -> int:
        """Return how many positions a block holds at most, so that it fits the ring well once it is encoded."""
        form = capture.encoding.format_of(self.memory.shape[1], self._wire_type)
        largest = self._largest_block * self.row_bytes // max(form.row_bytes, self.row_bytes)
        most = min(MAX_CHUNK_POSITIONS, largest // capture.units)
        if form.prefix_bytes:  # a layer's rows that are encoded together fit a chunk
            most = min(most, (TARGET_CHUNK_BYTES - form.prefix_bytes) // form.row_bytes)
        return most

    def leaving(self, count: int) -> None:
        """Note that blocks will be given back by another thread."""
        with self._changed:
            self._leaving += count

    def give_back(self, block: Block) -> None:
        """Return a block whose rows have been copied out."""
        with self._changed:
            self._runs.give_back(block.first_row, block.num_rows)
            self._leaving = max(self._leaving - 1, 0)
            self._changed.notify()

    def fail(self) -> None:
        """Note that blocks on their way out will not come back."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()
