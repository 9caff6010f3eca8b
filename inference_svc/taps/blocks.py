"""Capture blocks: device memory that requests fill position by position, as attention fills pages of the KV cache."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from inference_svc.shipping.free_runs import FreeRuns
from inference_svc.taps.element_types import WIRE_TYPES
from residuum.wire.limits import BLOCK_TOKENS, MAX_CHUNK_POSITIONS, TARGET_CHUNK_BYTES
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from inference_svc.taps.plan import Capture


_log = get_logger(__name__)


class PoolExhaustedError(RuntimeError):
    """The pool has no room for a block, and none will become free. See `BlockPool.rows_needed`."""


@dataclass
class Block:
    """A block that one request fills: pool rows [units, capacity], with one unit for each site and layer."""

    first_row: int
    """The pool row for the first unit of the first position."""
    capacity: int
    """The number of positions that fit. It is also the distance, in pool rows, from one unit to the next."""
    capture: Capture
    """The capture that the block belongs to."""
    limit: int
    """The number of positions at which the block is full: its capacity, or less if its rows are to leave sooner."""
    positions: list[int] = field(default_factory=list)
    """The positions that the block holds, in the order of its rows."""
    may_gather: bool = False
    """Whether the rows may wait a little for others once the block is full: more of the reply follows, and nobody asked
    for each row at once."""

    @property
    def free(self) -> int:
        """How many more positions fit until it is full."""
        return self.limit - len(self.positions)

    @property
    def num_rows(self) -> int:
        """How many pool rows the block takes."""
        return self.capture.units * self.capacity


class BlockPool:
    """The memory of all blocks, [rows, hidden] in the model's dtype, allocated once.

    A block takes rows only for the sites and layers of its capture. Blocks for generated tokens hold up to 32 positions
    and fill slowly; they come from the end of the pool. Blocks for a prompt hold the positions of one step and leave
    after that step; they come from the start. So the two kinds do not fragment each other's room.
    """

    def __init__(
        self,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        largest_block: int,
        encoded_width: int = 0,
    ) -> None:
        """Allocate the memory.

        Args:
            rows: Rows of the pool; see `rows_needed`.
            hidden: Elements of a row.
            dtype: The model's dtype.
            device: The model's device.
            largest_block: Most rows of a block with more than the minimum of positions. Chosen so that several fit the
                ring.
            encoded_width: Elements of a row when it is encoded, if the pool holds only parts of rows.
        """
        self.memory: Tensor = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self.row_bytes = hidden * self.memory.itemsize
        """Bytes of a row."""
        self._runs = FreeRuns(rows)
        self._wire_type = WIRE_TYPES[dtype]
        self._largest_block = largest_block
        self._encoded_width = encoded_width or hidden
        self.is_short = threading.Event()
        """Set when a call of `take` waits for blocks that are leaving."""
        self.before_waiting: Callable[[], bool] = lambda: False
        """`take` calls it before it waits. It gives back blocks that the same thread sends, or returns False if there
        are none."""
        self._changed = threading.Condition()
        self._leaving = 0
        self.has_failed = False
        """Whether blocks could not leave the device."""

    @staticmethod
    def rows_needed(step_tokens: int, requests: int, units: int, steps_leaving: int = 0) -> int:
        """Return how many rows are enough for any step.

        A step fills step_tokens / 32 blocks of 32 positions. Each request may leave two more blocks partly filled: one
        at the end of its prompt, and one for generated tokens. Those of a preempted request leave at once.

        Args:
            step_tokens: Most tokens that one step computes.
            requests: Most requests that run at once.
            units: Most rows of one captured position: sites times layers.
            steps_leaving: Earlier steps whose blocks may not have left the device yet.
        """
        blocks = (1 + steps_leaving) * (-(-step_tokens // BLOCK_TOKENS) + requests) + requests
        return blocks * BLOCK_TOKENS * units

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.memory.nbytes)

    @property
    def free_rows(self) -> int:
        """Rows that belong to no block."""
        with self._changed:
            return self._runs.total

    def rows(self, block: Block) -> Tensor:
        """Return a view of a block's filled rows, [units, positions, hidden]."""
        width = self.memory.shape[1]
        return self.memory.as_strided(  # one call of torch: slices and views would be four
            (block.capture.units, len(block.positions), width),
            (block.capacity * width, width, 1),
            block.first_row * width,
        )

    def take(
        self, capture: Capture, positions: int, min_capacity: int = BLOCK_TOKENS, limit: int | None = None
    ) -> Block:
        """Allocate a block. Wait for room while other blocks are leaving the device.

        Args:
            capture: The capture that fills the block.
            positions: How many positions this step has for the block. The block may hold fewer.
            min_capacity: The least capacity in positions, at most 32.
            limit: The number of positions at which the block is full. None: its capacity. A lower limit does not make
                the block smaller, because runs of many different lengths would fragment the pool.

        Raises:
            PoolExhaustedError: There is no room, and none will become free.
        """
        largest = min_capacity
        if positions > min_capacity:
            largest = max(min_capacity, min(positions, self._max_capacity(capture)))
        capacities = sorted({min_capacity, largest}, reverse=True)
        may_wait = False  # whether only other threads can give back blocks
        while True:
            with self._changed:
                if self.has_failed:
                    raise PoolExhaustedError(
                        "Captured rows cannot leave the device; the log above says why. Restart the service."
                    )
                for capacity in capacities:
                    first = self._runs.take(capacity * capture.units, from_end=capacity <= BLOCK_TOKENS)
                    if first is not None:
                        return Block(first, capacity, capture, min(capacity, limit or capacity))
                if not self._leaving:
                    raise PoolExhaustedError(
                        f"No room is left for captured rows: the pool is too small for this step ({self.free_rows} of "
                        f"{len(self.memory)} rows are free). This is a defect of residuum: please report it."
                    )
                if may_wait:
                    self.is_short.set()
                    self._changed.wait()
                    may_wait = False
                    continue
            may_wait = not self.before_waiting()  # without the lock: other threads may give back blocks meanwhile

    def _max_capacity(self, capture: Capture) -> int:
        """Return the most positions of a block such that its encoded rows fit the ring and chunks well.

        A layer's rows must fit one chunk. Otherwise they are cut by positions, so each chunk has rows of one layer
        alone: a prompt of 512 tokens would make 72 chunks of 1 MB instead of 13 of up to 5.9 MB. Encodings with a
        prefix could not be cut at all, because a layer's rows are encoded together.
        """
        form = capture.encoding.format_of(self._encoded_width, self._wire_type)
        row_bytes = self._encoded_width * int(self.memory.itemsize)
        max_rows = self._largest_block * row_bytes // max(form.row_bytes, row_bytes)
        in_chunk = (TARGET_CHUNK_BYTES - form.prefix_bytes) // form.row_bytes
        return min(MAX_CHUNK_POSITIONS, max_rows // capture.units, in_chunk)

    def leaving(self, count: int) -> None:
        """Note that `count` blocks will be given back. Until then, `take` waits instead of failing."""
        with self._changed:
            self._leaving += count

    def give_back(self, *blocks: Block) -> None:
        """Free blocks whose rows are no longer needed."""
        with self._changed:
            for block in blocks:
                self._runs.give_back(block.first_row, block.num_rows)
            self._leaving = max(self._leaving - len(blocks), 0)
            self._changed.notify()

    @contextmanager
    def failing_on_error(self) -> Iterator[None]:
        """Log an error in the `with` statement. From then on, blocks never come back, and every `take` fails."""
        try:
            yield
        except Exception:  # noqa: BLE001 - logged, and `take` raises
            if not self.has_failed:
                _log.exception("captured rows cannot be copied from the device")
            with self._changed:
                self.has_failed = True
                self._changed.notify_all()
