"""The life of a capture: open, sealed, ended. Pure: the caller brings the time and writes what changes."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from residuum.v1 import capture_pb2, store_pb2
from store_svc.captures.ledger import Cells, Ledger
from store_svc.captures.positions import Positions

OPEN = capture_pb2.CAPTURE_STATE_OPEN
COMPLETE = capture_pb2.CAPTURE_STATE_COMPLETE
INCOMPLETE = capture_pb2.CAPTURE_STATE_INCOMPLETE
ABORTED = capture_pb2.CAPTURE_STATE_ABORTED

_TIMED_OUT = capture_pb2.INCOMPLETE_REASON_TIMED_OUT


class Wait(enum.Enum):
    """What a capture that has not ended waits for."""

    SEAL = enum.auto()
    """The end of its request."""
    ROWS = enum.auto()
    """Expected rows: its request ended by itself."""
    REMNANTS = enum.auto()
    """Rows that were under way when its request was aborted, or failed; others will not come."""


_CAPTURE_BYTES = 8 << 10
_PER_BYTE = 4
_BLOCK_BYTES = 400
_FRAME_BYTES = 120
"""Memory of a capture that has not ended, at the least; of each byte of its description and seal, which are kept more
than once, and not as varints; of a block of positions of one of its rows, with its places in
two dictionaries; and of a frame's key."""


class Capture:
    """One capture that may still change.

    A capture *ends* when its state and its rows are final, both at once: whatever the outcome that it was sealed with,
    rows that were under way are waited for. The writer changes a fork and publishes it after the commit, so whoever
    holds a Capture that was published reads it without a lock.
    """

    def __init__(
        self, number: int, description: capture_pb2.CaptureDescription, open_time: Timestamp, progress: float
    ) -> None:
        """Open a capture.

        Args:
            number: Its internal number, never used again.
            description: What it is of.
            open_time: When it was opened, by the wall clock.
            progress: The monotonic clock now, in seconds; see `progress`.
        """
        self.number = number
        self.ledger = Ledger(description)
        self.seal: store_pb2.SealCaptureRequest | None = None
        self.num_losses = 0
        self.num_frames = 0
        self.progress = progress
        """When it was opened or sealed, or a row or a loss came, by the monotonic clock in seconds."""
        self._loss: store_pb2.RowLoss | None = None
        self._record = capture_pb2.CaptureManifest(description=description, state=OPEN, open_time=open_time)
        self._message_bytes = _CAPTURE_BYTES + _PER_BYTE * description.ByteSize()

    def fork(self) -> Capture:
        """Return a copy that can be changed while others read this one."""
        fork = object.__new__(Capture)
        fork.__dict__.update(self.__dict__)
        fork.ledger = self.ledger.fork()
        fork._record = capture_pb2.CaptureManifest()
        fork._record.CopyFrom(self._record)
        return fork

    @property
    def description(self) -> capture_pb2.CaptureDescription:
        """What it is of."""
        return self._record.description

    @property
    def sequences(self) -> Sequence[capture_pb2.SequenceOutcome]:
        """How its sequences ended; empty until it is sealed."""
        return self._record.sequences

    @property
    def state(self) -> capture_pb2.CaptureState.ValueType:
        """Where it stands."""
        return self._record.state

    @property
    def wait(self) -> Wait:
        """What it waits for; without meaning once it has ended."""
        if self.seal is None:
            return Wait.SEAL
        return Wait.ROWS if self.seal.outcome == COMPLETE else Wait.REMNANTS

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self._record.state != OPEN

    @property
    def account_bytes(self) -> int:
        """About how much memory it takes to keep account of it, until it has ended."""
        return self._message_bytes + _BLOCK_BYTES * self.ledger.num_blocks + _FRAME_BYTES * self.num_frames

    @property
    def num_bytes(self) -> int:
        """Bytes of its frames."""
        return self._record.num_bytes

    def is_of(self, description: capture_pb2.CaptureDescription) -> bool:
        """Tell whether someone who opens a capture with this description means this one.

        Whoever did not get the answer tries again, perhaps as a new request at a later time. But once something was
        written, another time is another request: rows of two must never be mixed.
        """
        if description == self.description:
            return True
        untouched = self.seal is None and not self.num_bytes and not self.num_losses
        return untouched and _timeless(description) == _timeless(self.description)

    def add(self, cells: Cells, frame_bytes: int, progress: float) -> None:
        """Record a stored frame."""
        self.ledger.add(cells)
        self._record.num_bytes += frame_bytes
        self.num_frames += 1
        self.progress = progress

    def lose(self, loss: store_pb2.RowLoss, progress: float) -> None:
        """Record rows that will never come. The first loss gives the reason if the capture ends INCOMPLETE."""
        positions = Positions.of(sorted(set(loss.positions)))
        for site in loss.sites:
            self.ledger.lose(Cells(loss.sequence, site, loss.layers, positions))
        self._loss = self._loss or loss
        self.num_losses += 1
        self.progress = progress

    def close(self, seal: store_pb2.SealCaptureRequest, now: Timestamp, progress: float) -> None:
        """Seal it: fix what is expected. It ends at once if nothing of that is outstanding."""
        self.seal = seal
        self._message_bytes += _PER_BYTE * seal.ByteSize()
        self.progress = progress
        self._record.seal_time.CopyFrom(now)
        self._record.sequences.extend(seal.sequences)
        self._record.steering_changes.extend(seal.steering_changes)
        self.ledger.expect([len(sequence.generated_token_ids) for sequence in seal.sequences])
        self.advance(now)

    def advance(self, now: Timestamp) -> None:
        """End it if it is sealed and nothing more is to come."""
        if self.seal is not None and not self.ended and not self.ledger.outstanding:
            loss = self._loss or store_pb2.RowLoss()  # what is missing now was lost
            self._end(self.seal, loss.reason, loss.detail, now)

    def time_out(self, now: Timestamp, waited: float) -> None:
        """End it although its seal or rows are outstanding: nothing came for `waited` seconds."""
        if self.seal is not None:
            detail = f"{self.ledger.outstanding} rows did not come; none of them in the last {waited:g} s"
            self._end(self.seal, _TIMED_OUT, detail, now)
            return
        self.ledger.expect_found()
        self._record.end_time.CopyFrom(now)
        detail = f"the inference service never sealed it, and nothing was written in the last {waited:g} s; "
        self._blame(_TIMED_OUT, detail + "how many tokens were generated is not known")

    def manifest(self) -> capture_pb2.CaptureManifest:
        """Return the manifest as it is now."""
        manifest = self.record()
        manifest.num_rows = self.ledger.num_rows
        manifest.present.extend(map(_row_set, self.ledger.present()))
        manifest.missing.extend(map(_row_set, self.ledger.absent()))
        return manifest

    def record(self) -> capture_pb2.CaptureManifest:
        """Return the manifest without what follows from the frames: rows, and which they are."""
        record = capture_pb2.CaptureManifest()
        record.CopyFrom(self._record)
        return record

    def summary(self) -> store_pb2.CaptureSummary:
        """Return the capture in short."""
        return summarize(self._record, self.ledger.num_rows)

    def _end(
        self,
        seal: store_pb2.SealCaptureRequest,
        reason: capture_pb2.IncompleteReason.ValueType,
        detail: str,
        now: Timestamp,
    ) -> None:
        """Give it the state that the seal named; if that was COMPLETE and rows are missing, INCOMPLETE for `reason`."""
        self._record.state = seal.outcome
        self._record.end_time.CopyFrom(now)
        if seal.outcome == INCOMPLETE:
            self._blame(seal.incomplete_reason, seal.incomplete_detail)
        elif seal.outcome == COMPLETE and self.ledger.missing:
            self._blame(reason, detail)

    def _blame(self, reason: capture_pb2.IncompleteReason.ValueType, detail: str) -> None:
        self._record.state = INCOMPLETE
        self._record.incomplete_reason = reason
        self._record.incomplete_detail = detail


def restore(
    number: int,
    record: capture_pb2.CaptureManifest,
    frames: list[tuple[Cells, int]],
    losses: list[store_pb2.RowLoss],
    seal: store_pb2.SealCaptureRequest | None,
    progress: float,
) -> Capture:
    """Return the capture that the database describes.

    Args:
        number: Its internal number.
        record: Its record.
        frames: The cells and bytes of each of its frames.
        losses: Its losses, in the order in which they came.
        seal: Its seal.
        progress: The monotonic clock now, in seconds: the wait for missing rows starts anew.
    """
    capture = Capture(number, record.description, record.open_time, progress)
    for cells, frame_bytes in frames:
        capture.add(cells, frame_bytes, progress)
    for loss in losses:
        capture.lose(loss, progress)
    if seal is not None:
        capture.close(seal, record.seal_time, progress)
    return capture


def ended_ledger(manifest: capture_pb2.CaptureManifest) -> Ledger:
    """Return the ledger of an ended capture, as far as its manifest tells: served cells and expectations."""
    ledger = Ledger(manifest.description)
    for item in manifest.present:
        runs = Positions.of_runs((run.first, run.last) for run in item.positions)
        ledger.add(Cells(item.sequence, item.site, item.layers, runs))
    if manifest.sequences:
        ledger.expect([len(sequence.generated_token_ids) for sequence in manifest.sequences])
    else:
        ledger.expect_found()
    return ledger


def summarize(manifest: capture_pb2.CaptureManifest, num_rows: int) -> store_pb2.CaptureSummary:
    """Return a capture in short."""
    summary = store_pb2.CaptureSummary(
        capture_id=manifest.description.capture_id,
        tenant=manifest.description.tenant,
        model=manifest.description.model,
        state=manifest.state,
        num_rows=num_rows,
        num_bytes=manifest.num_bytes,
        open_time=manifest.open_time,
    )
    if manifest.HasField("end_time"):
        summary.end_time.CopyFrom(manifest.end_time)
    return summary


def _timeless(description: capture_pb2.CaptureDescription) -> capture_pb2.CaptureDescription:
    timeless = capture_pb2.CaptureDescription()
    timeless.CopyFrom(description)
    timeless.ClearField("request_time")
    return timeless


def _row_set(cells: Cells) -> capture_pb2.RowSet:
    ranges = [capture_pb2.RowRange(first=first, last=last) for first, last in cells.positions.runs()]
    return capture_pb2.RowSet(
        sequence=cells.sequence, site=capture_pb2.Site.ValueType(cells.site), layers=cells.layers, positions=ranges
    )
