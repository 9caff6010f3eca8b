"""Captures with state between blocks: a reduction that is still running, or a projection basis."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from inference_svc.taps.reductions import Batch, Reduction
from inference_svc.taps.ring_writer import NO_MEMORY
from residuum.v1 import capture_pb2
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.taps.encodings.bases import Bases, Basis
    from inference_svc.taps.plan import Capture, RequestPlan
    from inference_svc.taps.ring_writer import RingWriter

_log = get_logger(__name__)


class _Followed(NamedTuple):
    """The state of one capture."""

    capture: Capture
    """Held so that its `id` stays unique."""
    basis: Basis | None
    """See `Bases.of`."""
    reduction: Reduction | None
    problem: str = ""
    """Why none of its rows can be sent; empty if they can."""


class FollowedCaptures:
    """Keeps the state of captures from the start of their request until their last block has left."""

    def __init__(self, bases: Bases, writer: RingWriter) -> None:
        """Follow no capture yet; losses are reported through `writer`."""
        self._bases = bases
        self._writer = writer
        # By object, not by capture ID: a new request may use an ID again before the last blocks of this one have left.
        self._followed: dict[int, _Followed] = {}

    def __len__(self) -> int:
        return len(self._followed)

    def begin(self, plan: RequestPlan) -> None:
        """Start to follow the capture of a request.

        If that fails, for example because the device has no memory left, all rows of this capture are reported as lost.
        Other captures go on.
        """
        capture = plan.capture
        assert capture is not None  # noqa: S101 - it is followed
        try:
            reduction = Reduction(plan) if capture.is_reduced else None
            followed = _Followed(capture, self._bases.of(capture), reduction)
        except (KeyError, MemoryError, RuntimeError) as error:
            _log.exception("cannot prepare for a capture", request_id=capture.capture_id)
            problem = f"The worker could not prepare for this capture ({type(error).__name__}); its log says why."
            followed = _Followed(capture, None, None, problem)
        self._followed[id(capture)] = followed

    def add(self, batch: Batch) -> Batch | None:
        """Take the rows of a block, and return the rows to send now, if any.

        Rows of captures that are not followed are returned unchanged. A reduction returns its row when it is complete.
        If there is no memory to reduce rows, all further rows of this capture are reported as lost.
        """
        followed = self._of(batch.capture)
        if followed is None:
            return batch
        if followed.problem:
            self._report_failed(batch.capture, batch.positions, followed.problem)
            return None
        reduction = followed.reduction
        if reduction is None:
            return batch
        try:
            reduced = reduction.add(batch)
        except NO_MEMORY as error:
            self._give_up(followed, [*reduction.pending, *batch.positions], error)
            return None
        return self._complete(reduced, reduction)

    def finish(self, capture: Capture) -> Batch | None:
        """Return the rows that a capture's reduction still owes after the last block, if any."""
        followed = self._of(capture)
        if followed is None or followed.reduction is None:
            return None
        try:
            reduced = followed.reduction.finish()
        except NO_MEMORY as error:
            self._give_up(followed, followed.reduction.pending, error)
            return None
        return self._complete(reduced, followed.reduction)

    def miss(self, capture: Capture, positions: Sequence[int]) -> None:
        """Note that some rows of a capture will never arrive, so a reduction over them is incomplete."""
        followed = self._of(capture)
        if followed is not None and followed.reduction is not None:
            followed.reduction.miss(positions)

    def basis(self, capture: Capture) -> Basis | None:
        """Return the basis of a capture; see `Bases.of`."""
        followed = self._of(capture)
        return None if followed is None else followed.basis

    def forget(self, capture: Capture) -> None:
        """Drop the state of a capture whose last rows have left."""
        del self._followed[id(capture)]

    def _of(self, capture: Capture) -> _Followed | None:
        return self._followed[id(capture)] if capture.is_followed else None

    def _complete(self, batch: Batch | None, reduction: Reduction) -> Batch | None:
        """Return reduced rows. If they include rows that never arrived, report the reduced rows as lost instead."""
        if batch is None or reduction.is_whole(batch):
            return batch
        self._report_failed(batch.capture, batch.positions, "Rows that this row is reduced from were lost.")
        return None

    def _give_up(self, followed: _Followed, positions: Sequence[int], error: BaseException) -> None:
        """Report the rows of a reduction that has no memory as lost, now and from now on. Free what it holds."""
        capture = followed.capture
        _log.error("rows cannot be reduced", capture_id=capture.capture_id, exc_info=error)
        problem = f"The worker could not reduce rows ({type(error).__name__}); its log says why."
        self._followed[id(capture)] = followed._replace(reduction=None, problem=problem)
        self._report_failed(capture, positions, problem)

    def _report_failed(self, capture: Capture, positions: Sequence[int], detail: str) -> None:
        self._writer.report_loss(capture, positions, capture_pb2.INCOMPLETE_REASON_WRITE_FAILED, detail)
