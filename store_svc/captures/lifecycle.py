"""The lifecycle of a capture: open, sealed, ended. It does no I/O; callers pass the time and write the changes."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from residuum.v1 import capture_pb2, probe_pb2, store_pb2
from residuum.wire.limits import MAX_MANIFEST_BYTES
from store_svc.captures.ledger import Cells, Ledger
from store_svc.captures.positions import Positions

OPEN = capture_pb2.CAPTURE_STATE_OPEN
COMPLETE = capture_pb2.CAPTURE_STATE_COMPLETE
INCOMPLETE = capture_pb2.CAPTURE_STATE_INCOMPLETE
ABORTED = capture_pb2.CAPTURE_STATE_ABORTED

_TIMED_OUT = capture_pb2.INCOMPLETE_REASON_TIMED_OUT
_STORE_FULL = capture_pb2.INCOMPLETE_REASON_STORE_FULL
_SERVICE_GONE = capture_pb2.INCOMPLETE_REASON_SERVICE_GONE


_TEXTS_TOO_LONG = "The manifest would not fit into one message with the texts of all tokens."
_SCORES_TOO_LONG = "The manifest would not fit into one message with the scores of all tokens."
_SPANS_TOO_LONG = "The manifest would not fit into one message with the positions of all messages."


class Wait(enum.Enum):
    """What an open capture waits for."""

    SEAL = enum.auto()
    """The seal, which comes when the request ends."""
    ROWS = enum.auto()
    """Expected rows: the capture was sealed COMPLETE."""
    REMNANTS = enum.auto()
    """Rows that were in flight when the request was aborted or failed, or its service died. No others will come."""


_CAPTURE_BYTES = 8 << 10
"""Memory of an open capture, at least."""
_PER_BYTE = 4
"""Memory for each byte of its description and seal. Both are kept more than once, and not as varints."""
_BLOCK_BYTES = 400
"""Memory of a block of positions of one ledger row, with its entries in two dictionaries."""
_FRAME_BYTES = 120
"""Memory of a frame's key."""


class Capture:
    """One capture that may still change.

    A capture *ends* when its state and its rows become final, both at once. Whatever outcome it is sealed with, it
    first waits for the rows in flight. The writer changes a fork and publishes the fork after the commit, so readers
    need no lock to read a published Capture.
    """

    def __init__(
        self, number: int, description: capture_pb2.CaptureDescription, open_time: Timestamp, progress: float
    ) -> None:
        """Open a capture.

        Args:
            number: The capture's internal number, which is never reused.
            description: What the capture holds.
            open_time: When it was opened, by the wall clock.
            progress: The monotonic clock now, in seconds.
        """
        self.number = number
        self.ledger = Ledger(description)
        self.seal: store_pb2.SealCaptureRequest | None = None
        self.num_losses = 0
        self.num_frames = 0
        self.progress = progress
        """When the capture was last opened, sealed, or sent a row or loss: the monotonic clock, in seconds."""
        self.is_abandoned = False
        """Whether the lease of its inference service has run out, so that no seal is expected."""
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
        """What the capture holds."""
        return self._record.description

    @property
    def sequences(self) -> Sequence[capture_pb2.SequenceOutcome]:
        """How the sequences ended; empty until the capture is sealed."""
        return self._record.sequences

    @property
    def state(self) -> capture_pb2.CaptureState.ValueType:
        """The capture's state."""
        return self._record.state

    @property
    def wait(self) -> Wait:
        """What the capture waits for; meaningless once it has ended."""
        if self.seal is None:
            return Wait.REMNANTS if self.is_abandoned else Wait.SEAL
        return Wait.ROWS if self.seal.outcome == COMPLETE else Wait.REMNANTS

    @property
    def ended(self) -> bool:
        """Whether the capture's state is final."""
        return self._record.state != OPEN

    @property
    def memory_bytes(self) -> int:
        """Estimated memory that the capture's state takes until it ends, in bytes."""
        return self._message_bytes + _BLOCK_BYTES * self.ledger.num_blocks + _FRAME_BYTES * self.num_frames

    @property
    def num_bytes(self) -> int:
        """Bytes of the capture's frames."""
        return self._record.num_bytes

    def matches(self, description: capture_pb2.CaptureDescription) -> bool:
        """Tell whether opening a capture with this description is a retry of opening this one.

        A caller that got no answer may retry with a later request time. Once anything was written, a different time
        means a different request: the rows of two requests must never mix.
        """
        if description == self.description:
            return True
        untouched = self.seal is None and not self.num_bytes and not self.num_losses
        return untouched and _without_time(description) == _without_time(self.description)

    def add(self, cells: Cells, frame_bytes: int, progress: float) -> None:
        """Record a stored frame."""
        self.ledger.add(cells)
        self._record.num_bytes += frame_bytes
        self.num_frames += 1
        self.progress = progress

    def lose(self, loss: store_pb2.RowLoss, progress: float) -> bool:
        """Record lost rows, and return whether any is new. The first loss gives the reason if it ends INCOMPLETE."""
        positions = Positions.of(sorted(set(loss.positions)))
        is_new = False
        for site in loss.sites:
            is_new |= self.ledger.lose(Cells(loss.sequence, site, loss.layers, positions))
        if is_new:
            self._loss = self._loss or loss
            self.num_losses += 1
        self.progress = progress
        return is_new

    def close(
        self, seal: store_pb2.SealCaptureRequest, now: Timestamp, progress: float, *, advance: bool = True
    ) -> None:
        """Seal the capture, which fixes the expected rows. With `advance`, it ends at once if none is outstanding."""
        self.seal = seal
        self._message_bytes += _PER_BYTE * seal.ByteSize()
        self.progress = progress
        self._record.seal_time.CopyFrom(now)
        self._record.sequences.extend(seal.sequences)
        self._record.steering_changes.extend(seal.steering_changes)
        self._record.rule_events.extend(seal.rule_events)
        for field in ("prompt_token_texts", "message_spans", "prompt_scores"):
            if seal.HasField(field):
                getattr(self._record, field).CopyFrom(getattr(seal, field))
        self.ledger.expect([len(sequence.generated_token_ids) for sequence in seal.sequences])
        if advance:
            self.advance(now)

    def advance(self, now: Timestamp) -> None:
        """End the capture if it is sealed and no row is outstanding."""
        if self.seal is not None and not self.ended and not self.ledger.outstanding:
            loss = self._loss or store_pb2.RowLoss()  # rows that are missing but not outstanding were lost
            self._end(self.seal, loss.reason, loss.detail, now)

    def abandon(self, progress: float) -> None:
        """Note that the lease of its inference service has run out. From now on, it waits only for rows in flight."""
        self.is_abandoned, self.progress = True, progress

    def resume(self, progress: float) -> None:
        """Note that its inference service holds a lease again."""
        self.is_abandoned, self.progress = False, progress

    def time_out(self, now: Timestamp, waited: float, why_full: str = "") -> None:
        """End the capture without its seal or outstanding rows, because nothing was written for `waited` seconds.

        Args:
            now: The wall clock.
            waited: The seconds.
            why_full: Why the store is full, if that is the reason.
        """
        reason = _STORE_FULL if why_full else _TIMED_OUT
        cause = f"the store was full ({why_full}); " if why_full else ""
        if self.seal is not None:
            detail = f"{cause}{self.ledger.outstanding} rows did not arrive; none arrived in the last {waited:g} s"
            self._end(self.seal, reason, detail, now)
            return
        self.ledger.expect_found()
        self._record.end_time.CopyFrom(now)
        if self.is_abandoned and not why_full:
            reason = _SERVICE_GONE
            cause = "the inference service was killed, or lost its connection to the store, before it sealed the "
            cause += "capture; "
        unsealed = cause or "the inference service never sealed the capture; "
        unknown = f"nothing was written in the last {waited:g} s; the number of generated tokens is unknown"
        self._mark_incomplete(reason, unsealed + unknown)

    def manifest(self) -> capture_pb2.CaptureManifest:
        """Return the current manifest."""
        manifest = self.record()
        manifest.num_rows = self.ledger.num_rows
        manifest.present.extend(map(_row_set, self.ledger.present()))
        manifest.missing.extend(map(_row_set, self.ledger.absent()))
        has_scores = manifest.prompt_scores.probes or any(item.scores.probes for item in manifest.sequences)
        if manifest.ByteSize() > MAX_MANIFEST_BYTES and has_scores:
            no_scores = probe_pb2.KeptScores(unknown_detail=_SCORES_TOO_LONG)
            manifest.prompt_scores.CopyFrom(no_scores)
            for sequence in manifest.sequences:
                sequence.scores.CopyFrom(no_scores)
        if manifest.ByteSize() > MAX_MANIFEST_BYTES:
            unknown = capture_pb2.TokenTexts(unknown_detail=_TEXTS_TOO_LONG)
            manifest.prompt_token_texts.CopyFrom(unknown)
            for sequence in manifest.sequences:
                sequence.token_texts.CopyFrom(unknown)
        if manifest.ByteSize() > MAX_MANIFEST_BYTES:
            manifest.message_spans.CopyFrom(capture_pb2.MessageSpans(unknown_detail=_SPANS_TOO_LONG))
        return manifest

    def record(self) -> capture_pb2.CaptureManifest:
        """Return the manifest without the number of rows and the row sets, which follow from the frames."""
        record = capture_pb2.CaptureManifest()
        record.CopyFrom(self._record)
        return record

    def summary(self) -> store_pb2.CaptureSummary:
        """Return the capture's summary."""
        return summarize(self._record, self.ledger.num_rows)

    def _end(
        self,
        seal: store_pb2.SealCaptureRequest,
        reason: capture_pb2.IncompleteReason.ValueType,
        detail: str,
        now: Timestamp,
    ) -> None:
        """Set the state that the seal named, or INCOMPLETE for `reason` if that was COMPLETE and rows are missing."""
        self._record.state = seal.outcome
        self._record.end_time.CopyFrom(now)
        if seal.outcome == INCOMPLETE:
            self._mark_incomplete(seal.incomplete_reason, seal.incomplete_detail)
        elif seal.outcome == COMPLETE and self.ledger.missing:
            self._mark_incomplete(reason, detail)

    def _mark_incomplete(self, reason: capture_pb2.IncompleteReason.ValueType, detail: str) -> None:
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
    """Return an open capture as the database describes it.

    It may have no outstanding rows, if its last rows were committed to shards just before the store was killed. The
    writer then ends it.

    Args:
        number: The capture's internal number.
        record: Its record; see `Capture.record`.
        frames: The cells and the size in bytes of each of its frames.
        losses: Its losses, in the order in which they came.
        seal: Its seal; None if it is not sealed.
        progress: The monotonic clock now, in seconds. Timeouts start again from here.
    """
    capture = Capture(number, record.description, record.open_time, progress)
    for cells, frame_bytes in frames:
        capture.add(cells, frame_bytes, progress)
    for loss in losses:
        capture.lose(loss, progress)
    if seal is not None:
        capture.close(seal, record.seal_time, progress, advance=False)
    return capture


def ended_ledger(manifest: capture_pb2.CaptureManifest) -> Ledger:
    """Return the ledger of an ended capture, with the served and expected cells that its manifest lists."""
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
    """Return a capture's summary.

    Args:
        manifest: The capture's manifest or record.
        num_rows: The number of its rows, which a record lacks.
    """
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


def _without_time(description: capture_pb2.CaptureDescription) -> capture_pb2.CaptureDescription:
    copy = capture_pb2.CaptureDescription()
    copy.CopyFrom(description)
    copy.ClearField("request_time")
    return copy


def _row_set(cells: Cells) -> capture_pb2.RowSet:
    ranges = [capture_pb2.RowRange(first=first, last=last) for first, last in cells.positions.runs()]
    return capture_pb2.RowSet(
        sequence=cells.sequence, site=capture_pb2.Site.ValueType(cells.site), layers=cells.layers, positions=ranges
    )
