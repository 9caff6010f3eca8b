"""The sink for rows of which each tensor-parallel rank has a part: whole rows are made when a block leaves.

Only rows that a request captures are exchanged, after the step that computed them. The ranks get the same steps, so
they fill and send the same blocks in the same order. No rank may skip a block, or the others would wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from inference_svc.taps.blocks import Block, BlockPool
    from inference_svc.taps.plan import Capture, RequestPlan
    from inference_svc.taps.points import RowShape
    from inference_svc.taps.sink import BlockSink
    from residuum.v1 import capture_pb2


class WholeRows(NamedTuple):
    """Where the whole rows of the captures of this rank go."""

    pool: BlockPool
    sink: BlockSink


class Join(Protocol):
    """Exchanges parts of rows with the other ranks; see `tensor_parallel.join`."""

    def __call__(self, parts: Tensor, shape: RowShape, *, keep: bool) -> Tensor | None:
        """Return whole rows, or None without `keep`."""


class JoiningSink:
    """Joins the rows of blocks with their parts on other ranks, and gives blocks of whole rows to another sink."""

    def __init__(self, parts: BlockPool, shape: RowShape, join: Join, whole: WholeRows | None) -> None:
        """Make the sink of one rank.

        Args:
            parts: The pool of this rank's parts.
            shape: The shape of a row.
            join: Exchanges parts of rows with the other ranks.
            whole: Where whole rows go; None on a rank that captures nothing.
        """
        self._parts = parts
        self._shape = shape
        self._join = join
        self._whole = whole

    def begin(self, plan: RequestPlan) -> None:
        """See `BlockSink.begin`."""
        if self._whole and plan.capture and plan.capture.is_own:
            self._whole.sink.begin(plan)

    def send(self, blocks: Sequence[Block]) -> None:
        """Join the rows of blocks, and give the blocks back to the pool of parts.

        If the pool of whole rows has no room, the step waits, as it does for any block of a full pool.
        """
        for block in blocks:
            if block.positions:
                rows = self._join(self._parts.rows(block), self._shape, keep=block.capture.is_own)
                if self._whole and rows is not None:
                    _pass_on(block, rows, self._whole)
            self._parts.give_back(block)

    def end(self, capture: Capture) -> None:
        """See `BlockSink.end`."""
        if self._whole and capture.is_own:
            self._whole.sink.end(capture)

    def publish(self, *, may_be_last: bool) -> None:
        """See `BlockSink.publish`."""
        if self._whole:
            self._whole.sink.publish(may_be_last=may_be_last)

    def hurry(self) -> None:
        """See `BlockSink.hurry`."""
        if self._whole:
            self._whole.sink.hurry()

    def lose(
        self,
        capture: Capture,
        positions: Sequence[int],
        reason: capture_pb2.IncompleteReason.ValueType,
        detail: str,
    ) -> None:
        """See `BlockSink.lose`."""
        if self._whole and capture.is_own:
            self._whole.sink.lose(capture, positions, reason, detail)


def _pass_on(block: Block, rows: Tensor, whole: WholeRows) -> None:
    """Send whole rows, [units, positions, width], in blocks of their own, which may hold fewer positions."""
    at = 0
    while at < len(block.positions):
        taken = whole.pool.take(block.capture, len(block.positions) - at)
        taken.positions.extend(block.positions[at : at + taken.capacity])
        taken.limit = len(taken.positions) + block.free  # full if the block of the parts was
        taken.may_gather = block.may_gather
        whole.pool.rows(taken).copy_(rows[:, at : at + len(taken.positions)])
        whole.sink.send([taken])
        at += len(taken.positions)
