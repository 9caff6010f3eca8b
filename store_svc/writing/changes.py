"""The changes that one write transaction makes to captures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.labels import LabelError, changed
from residuum.wire.rows.archive import capture_key
from residuum.wire.rows.frame_keys import FrameKey
from residuum.wire.rows.frames import ChunkView
from residuum.wire.tokens import ANY_TENANT
from store_svc.archive import records
from store_svc.captures.capture_names import CaptureName, name_of, unknown_capture
from store_svc.captures.catalog import Catalog
from store_svc.captures.labels import parse_labels, read_labels, write_labels
from store_svc.captures.ledger import Cells, Ledger
from store_svc.captures.lifecycle import Capture, ended_ledger
from store_svc.captures.numbers import take_number
from store_svc.checks import check_chunk, check_loss, check_seal, invalid
from store_svc.database.db import Table, Txn
from store_svc.database.frames import PlacedFrame, frame_bytes
from store_svc.database.keys import pack_loss, pack_number
from store_svc.reading.slicing import cells_of, slice_chunk
from store_svc.writing.existing import is_replaced
from store_svc.writing.placed import checksum_mismatch
from store_svc.writing.quotas import Quotas, Replaced
from store_svc.writing.room import store_full
from svc_common.security.tokens_file import Limits, no_limits


@dataclass(frozen=True)
class Clock:
    """The time of a transaction."""

    wall: Timestamp
    """The wall clock, for manifests."""
    monotonic: float
    """The monotonic clock in seconds, for waits."""

    @classmethod
    def now(cls) -> Clock:
        """Return the current time."""
        wall = Timestamp()
        wall.FromNanoseconds(time.time_ns())
        return cls(wall, time.monotonic())


class Batch:
    """The changes of one transaction. They stay invisible until `publish`, which the writer calls after the commit.

    A Batch that is never published has no effect, so a failed transaction can run again with a new Batch. A method that
    raises Failure has changed nothing.
    """

    def __init__(
        self,
        txn: Txn,
        catalog: Catalog,
        limits_of: Callable[[str], Limits] = no_limits,
        why_full: str = "",
    ) -> None:
        """Start with no changes.

        Args:
            txn: The transaction.
            catalog: The published captures.
            limits_of: Returns a tenant's limits.
            why_full: Why the store is full; empty if it has room. A full store opens no captures.
        """
        self._why_full = why_full
        self._quotas = Quotas(catalog, limits_of)
        self._txn = txn
        self._catalog = catalog
        self._clock = Clock.now()
        self._numbers: dict[CaptureName, int | None] = {}
        self._opened: dict[int, str] = {}  # by number: whose lease the open renews
        self._deleted: list[tuple[CaptureName, int]] = []
        self._archive_states: dict[int, capture_pb2.ArchiveState.ValueType] = {}
        self._claims_archive = False
        self._drafts: dict[int, Capture] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._growth: Counter[str] = Counter()  # bytes by which the state of a tenant's open captures grows
        self._ended_manifests: dict[int, capture_pb2.CaptureManifest] = {}
        self._ended_ledgers: dict[int, Ledger] = {}

    @property
    def wrote(self) -> bool:
        """Whether the transaction changes anything."""
        return self._txn.wrote

    @property
    def deletes(self) -> bool:
        """Whether the transaction deletes captures or moves their rows, so that frames must be freed."""
        return bool(self._deleted) or records.MOVED in self._archive_states.values()

    def open(
        self,
        description: capture_pb2.CaptureDescription,
        if_exists: capture_pb2.IfExists.ValueType = capture_pb2.IF_EXISTS_FAIL,
        holder: str = ANY_TENANT,
    ) -> capture_pb2.CaptureManifest | None:
        """Create a capture, unless the same capture is open already. It may replace one with the same ID.

        Args:
            description: What the capture holds.
            if_exists: What to do if there is a capture with this ID.
            holder: Whose lease the open renews; see `Leases.renew`.

        Returns:
            The manifest of the capture that exists already and is the result (IF_EXISTS_SKIP). None: the capture is
            open.

        Raises:
            Failure: CAPTURE_EXISTS, STORE_FULL, LIMIT_REACHED or QUOTA_EXCEEDED.
        """
        name = name_of(description)
        number = self._number(name)
        replaced = None
        if number is not None:
            draft = self._draft(number)
            if draft is not None and not draft.ended and draft.matches(description):
                return None
            existing = self._ended(number) if draft is None else draft.record()
            is_sealed = draft is not None and draft.seal is not None
            if not is_replaced(existing, description, if_exists, self._catalog.leases, is_sealed=is_sealed):
                return self._labelled(number, existing if draft is None else draft.manifest())
            replaced = Replaced(
                self._local_bytes(number, existing.num_bytes), was_open=draft is not None and not draft.ended
            )
        if self._why_full:
            raise store_full(self._why_full, description.capture_id)
        self._check_catalog(name.tenant, num_replaced=0 if replaced is None else 1)
        self._quotas.open(description.tenant, replaced)
        if replaced is not None:
            self.delete(name)
        number = take_number(self._txn)
        capture = Capture(number, description, self._clock.wall, self._clock.monotonic)
        self._growth[description.tenant] += capture.memory_bytes
        self._numbers[name] = number
        self._opened[number] = holder
        self._drafts[number] = capture
        self._put_record(capture)
        write_labels(self._txn, description.tenant, number, changed([], description.spec.labels, []))
        return None

    def append(self, name: CaptureName, frame: memoryview | PlacedFrame, chunk: ChunkView, attempt: int = 0) -> bool:
        """Store the rows of a chunk that are not stored yet.

        Args:
            name: The capture.
            frame: The bytes of the Chunk, or its frame in shared memory.
            chunk: The same chunk, parsed. The caller has verified the checksum of bytes; that of a frame in shared
                memory is verified when it is written.
            attempt: The capture's attempt, as the writer names it.

        Returns:
            Whether any row was stored.

        Raises:
            Failure: UNKNOWN_CAPTURE, CAPTURE_ENDED, INVALID_FIELD, LIMIT_REACHED, QUOTA_EXCEEDED or CHECKSUM_MISMATCH.
            PayloadChangedError: See `Txn.put_frame`.
        """
        number, draft = self._require_attempt(name, attempt)
        if draft is None or draft.ended:
            self._check_repeat(number, draft, chunk)
            return False
        check_chunk(chunk.header, draft.description)
        cells = cells_of(chunk.header)
        before = draft.memory_bytes
        groups = draft.ledger.fresh(cells)
        if groups:
            self._check_memory(name.tenant)
            self._quotas.check_room(name.tenant, frame_bytes(frame))
        if list(groups.values()) == [list(cells.layers)] and cells.positions in groups:
            self._put_frame(draft, frame, cells)
        elif groups:
            chunk = _unchanging(frame, chunk, name.capture_id)
            for positions, layers in groups.items():
                self._put_part(draft, chunk, cells._replace(layers=layers, positions=positions))
        if groups:
            self._growth[name.tenant] += draft.memory_bytes - before
            self._advance(draft)
        return bool(groups)

    def lose(self, name: CaptureName, loss: store_pb2.RowLoss, attempt: int = 0) -> None:
        """Record lost rows. Those that are known are not written again. An ended capture ignores all.

        Raises:
            Failure: UNKNOWN_CAPTURE, INVALID_FIELD or LIMIT_REACHED.
        """
        _, draft = self._require_attempt(name, attempt)
        if draft is None or draft.ended:
            return
        check_loss(loss, draft.description)
        self._check_memory(name.tenant)
        before, key = draft.memory_bytes, pack_loss(draft.number, draft.num_losses)
        if draft.lose(loss, self._clock.monotonic):
            self._txn.put(Table.LOSSES, key, loss.SerializeToString())
        self._growth[name.tenant] += draft.memory_bytes - before
        self._advance(draft)

    def seal(self, name: CaptureName, seal: store_pb2.SealCaptureRequest) -> None:
        """Seal a capture. Repeating the same seal changes nothing.

        Raises:
            Failure: UNKNOWN_CAPTURE or INVALID_FIELD; CAPTURE_ENDED if the capture was sealed differently.
        """
        number, draft = self._require_attempt(name, seal.attempt)
        if draft is None or draft.seal is not None:
            self._check_same_seal(number, draft, seal)
            return
        check_seal(seal, draft.description)
        draft.close(seal, self._clock.wall, self._clock.monotonic)
        self._txn.put(Table.SEALS, pack_number(number), seal.SerializeToString())
        self._put_record(draft)

    def manifest(self, name: CaptureName) -> capture_pb2.CaptureManifest:
        """Return a capture's manifest with its labels.

        Raises:
            Failure: UNKNOWN_CAPTURE.
        """
        number = self._require(name)
        draft = self._draft(number)
        return self._labelled(number, self._ended(number) if draft is None else draft.manifest())

    def label(self, name: CaptureName, request: store_pb2.LabelCaptureRequest) -> list[capture_pb2.Label]:
        """Change the labels of a capture, and return all that it then has.

        Raises:
            Failure: UNKNOWN_CAPTURE, or INVALID_FIELD if a label is invalid or there would be too many.
        """
        number = self._require(name)
        before = parse_labels(read_labels(self._txn, number))
        try:
            labels = changed(before, request.labels, request.removed_names)
        except LabelError as error:
            raise invalid("labels", f"{error}") from None
        if labels != before:
            write_labels(self._txn, name.tenant, number, labels)
            records.note_labels(self._txn, number)
        return labels

    def delete(self, name: CaptureName) -> int:
        """Delete a capture and return the bytes of its frames. Later transactions free the frames; see `purge_some`.

        Raises:
            Failure: UNKNOWN_CAPTURE.
        """
        number = self._require(name)
        draft = self._draft(number)
        num_bytes = draft.num_bytes if draft else self._ended_bytes(number)
        local_bytes = num_bytes if draft else self._local_bytes(number, num_bytes)
        self._quotas.delete(name.tenant, local_bytes, was_open=draft is not None and not draft.ended)
        key = pack_number(number)
        records.note_deletion(self._txn, number)
        self._archive_states.pop(number, None)
        for table in (Table.LIVE, Table.ENDED, Table.SEALS):
            self._txn.delete(table, key)
        write_labels(self._txn, name.tenant, number, [])
        self._txn.put(Table.DOOMED, key, b"")
        self._numbers[name] = None
        self._drafts.pop(number, None)
        self._deleted.append((name, number))
        return num_bytes

    def time_out(self, number: int, waited: float, why_full: str = "") -> None:
        """End a capture that made no progress for `waited` seconds, unless it has changed in the meantime.

        Args:
            number: The capture's number.
            waited: The seconds.
            why_full: Why the store is full, if that is why it made no progress.
        """
        draft = self._draft(number)
        if draft is None or draft.ended or self._clock.monotonic - draft.progress < waited:
            return
        if draft.is_abandoned and draft.seal is None and self._service_lives(draft):
            draft.resume(self._clock.monotonic)  # its service was only out of reach for a while
            return
        draft.time_out(self._clock.wall, waited, why_full)
        self._put_record(draft)

    def abandon(self, number: int) -> None:
        """Stop waiting for the seal of a capture whose service's lease has run out, unless it was renewed since."""
        draft = self._draft(number)
        if draft is not None and not draft.ended and draft.seal is None and not self._service_lives(draft):
            draft.abandon(self._clock.monotonic)

    def finish(self, number: int) -> None:
        """End a capture that is sealed and has no outstanding rows, unless it was deleted in the meantime."""
        draft = self._draft(number)
        if draft is not None and not draft.ended:
            self._advance(draft)

    def begin_copy(self, number: int) -> str | None:
        """Note that objects of an ended capture may be in the archive from now on, and return their name.

        This always writes. The commit syncs the one before, so no power cut can undo the end of the capture later.

        Returns:
            None if the capture is gone, or the archive has it already.
        """
        value = self._txn.get(Table.ENDED, pack_number(number))
        record = records.read_record(self._txn, number)
        if value is None or (record is not None and record.state != records.PENDING):
            return None
        manifest = capture_pb2.CaptureManifest.FromString(bytes(value))
        key = capture_key(number, manifest.description, manifest.open_time.ToNanoseconds())
        records.write_record(self._txn, number, records.Record(records.PENDING, key))
        return key

    def note_copied(
        self, number: int, key: str, places: Iterable[tuple[bytes, records.Place]], *, is_last: bool
    ) -> bool:
        """Note where the archive has frames of a capture, and with `is_last` that it has the whole capture.

        Returns:
            Whether the capture still exists. If not, its objects are going to be deleted.
        """
        if records.read_record(self._txn, number) != (records.PENDING, key):
            return False
        records.write_places(self._txn, places)
        if is_last:
            records.write_record(self._txn, number, records.Record(records.COPIED, key))
            self._archive_states[number] = records.COPIED
        return True

    def drop_rows(self, numbers: Iterable[int]) -> None:
        """Drop the rows of captures from the database, if the archive has them. Later transactions free them."""
        for number in numbers:
            record = records.read_record(self._txn, number)
            if record is None or record.state != records.COPIED:
                continue
            self._txn.note_rows_elsewhere()
            records.write_record(self._txn, number, records.Record(records.MOVED, record.key))
            self._txn.put(Table.DOOMED, pack_number(number), records.ROWS_ONLY)
            self._archive_states[number] = records.MOVED

    def note_labels_copied(self, number: int, labels: bytes) -> None:
        """Note that the archive has these labels of a capture, as `read_labels` returned them."""
        if read_labels(self._txn, number) == labels:
            records.end_label_change(self._txn, number)

    def begin_deletions(self, keys: Iterable[str]) -> None:
        """Note that the objects of deleted captures are about to be deleted.

        This writes. The commit syncs the one before, so no power cut can undo the deletion of a capture later.
        """
        for key in keys:
            records.note_objects_to_delete(self._txn, key)

    def end_deletions(self, keys: Iterable[str]) -> None:
        """Note that the objects of deleted captures are gone."""
        for key in keys:
            records.end_deletion(self._txn, key)

    def claim_archive(self) -> None:
        """Note that the archive belongs to this store."""
        records.claim(self._txn)
        self._claims_archive = True

    def publish(self) -> list[Capture]:
        """Make the changes visible in the catalog. Return the captures that changed."""
        for name, number in self._deleted:
            if number not in self._opened:
                self._catalog.delete(name, number)
        for number, draft in self._drafts.items():
            if number in self._opened:
                self._catalog.open(draft, [], self._opened[number])
            self._catalog.publish(draft, self._keys.get(number, []))
        for number, state in self._archive_states.items():
            self._catalog.note_archive_state(number, state)
        if self._claims_archive:
            self._catalog.is_archive_claimed = True
        return list(self._drafts.values())

    def _check_catalog(self, tenant: str, num_replaced: int) -> None:
        limit = self._catalog.limits.max_captures
        if self._catalog.num_captures + len(self._opened) - len(self._deleted) - num_replaced >= limit:
            message = (
                f"The store already keeps {limit} captures, its limit (--max-captures). Delete some, or let old ones "
                "expire (--retain-hours)."
            )
            raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit="max_captures")
        self._check_memory(tenant)

    def _check_memory(self, tenant: str) -> None:
        limit = self._catalog.limits.max_open_bytes
        share = self._quotas.limits_of(tenant).share_of(limit)
        if self._catalog.open_bytes + self._growth.total() >= limit:
            whose = f"The open captures take all {limit >> 20} MiB"
        elif self._catalog.holdings(tenant).open_bytes + self._growth[tenant] >= share:
            whose = f"The open captures of your tenant take its share, {share >> 20} of {limit >> 20} MiB,"
        else:
            return
        message = f"{whose} that the store has for them (--max-open-mib). Wait until some have ended."
        raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit="max_open_mib")

    def _number(self, name: CaptureName) -> int | None:
        if name in self._numbers:
            return self._numbers[name]
        return self._catalog.number_of(name)

    def _require(self, name: CaptureName) -> int:
        number = self._number(name)
        if number is None:
            raise unknown_capture(name.capture_id)
        return number

    def _require_attempt(self, name: CaptureName, attempt: int) -> tuple[int, Capture | None]:
        """Return a capture's number and draft; see `_draft`.

        Raises:
            Failure: UNKNOWN_CAPTURE. Also if the capture of this name is of another attempt: the writer's capture was
                deleted or replaced, and its late rows must not become rows of the new one.
        """
        number = self._require(name)
        draft = self._draft(number)
        description = (self._ended(number) if draft is None else draft).description
        if description.attempt != attempt:
            raise unknown_capture(name.capture_id)
        return number, draft

    def _service_lives(self, draft: Capture) -> bool:
        return self._catalog.leases.is_held(draft.description.service_instance, draft.description.tenant)

    def _draft(self, number: int) -> Capture | None:
        """Return the draft of a capture that this batch may change, or None if it had ended before this batch."""
        draft = self._drafts.get(number)
        feed = self._catalog.feed_of(number)
        if draft is None and feed is not None:
            draft = self._drafts[number] = feed.capture.fork()
        return draft

    def _ended(self, number: int) -> capture_pb2.CaptureManifest:
        """Return the manifest of a capture that had ended before this batch."""
        if number not in self._ended_manifests:
            value = self._txn.get(Table.ENDED, pack_number(number))
            self._ended_manifests[number] = capture_pb2.CaptureManifest.FromString(bytes(value or b""))
        return self._ended_manifests[number]

    def _ended_ledger(self, number: int) -> Ledger:
        if number not in self._ended_ledgers:
            self._ended_ledgers[number] = ended_ledger(self._ended(number))
        return self._ended_ledgers[number]

    def _ended_bytes(self, number: int) -> int:
        """Return the bytes of the frames of a capture that had ended before this batch. This reads no manifest."""
        summary = self._catalog.summary_of(number)
        assert summary is not None  # noqa: S101 - it would have a draft if it had not ended
        return summary.num_bytes

    def _local_bytes(self, number: int, num_bytes: int) -> int:
        """Return how many of the bytes of a capture's frames are in this database."""
        record = records.read_record(self._txn, number)
        return 0 if record is not None and record.state == records.MOVED else num_bytes

    def _check_repeat(self, number: int, draft: Capture | None, chunk: ChunkView) -> None:
        manifest = draft.record() if draft else self._ended(number)
        ledger = draft.ledger if draft else self._ended_ledger(number)
        check_chunk(chunk.header, manifest.description)
        cells = cells_of(chunk.header)
        # Without a seal, only the positions that were found are expected, so `fresh` would not return others.
        has_new = bool(ledger.fresh(cells)) if manifest.sequences else not ledger.has(cells)
        if has_new:
            raise _has_ended(manifest)

    def _check_same_seal(self, number: int, draft: Capture | None, seal: store_pb2.SealCaptureRequest) -> None:
        if draft is not None:
            before = draft.seal
        else:
            value = self._txn.get(Table.SEALS, pack_number(number))
            before = store_pb2.SealCaptureRequest.FromString(bytes(value or b""))
        if before != seal:
            raise _has_ended(self._ended(number) if draft is None else draft.record())

    def _labelled(self, number: int, manifest: capture_pb2.CaptureManifest) -> capture_pb2.CaptureManifest:
        """Return a manifest with the capture's labels."""
        labelled = capture_pb2.CaptureManifest()
        labelled.CopyFrom(manifest)
        labelled.MergeFromString(read_labels(self._txn, number))
        return labelled

    def _put_part(self, draft: Capture, chunk: ChunkView, cells: Cells) -> None:
        layers = [at for at, layer in enumerate(chunk.header.layers) if layer in set(cells.layers)]
        positions = [at for at, position in enumerate(chunk.header.positions) if position in cells.positions]
        self._put_frame(draft, b"".join(slice_chunk(chunk, layers, positions)), cells)

    def _put_frame(self, draft: Capture, frame: bytes | memoryview | PlacedFrame, cells: Cells) -> None:
        runs = cells.positions.runs()
        key = FrameKey(
            number=draft.number,
            sequence=cells.sequence,
            site=cells.site,
            first_layer=cells.layers[0],
            last_layer=cells.layers[-1],
            first_position=runs[0][0],
            last_position=runs[-1][1],
        ).pack()
        self._txn.put_frame(key, frame)
        self._keys.setdefault(draft.number, []).append(key)
        draft.add(cells, frame_bytes(frame), self._clock.monotonic)
        self._quotas.add(draft.description.tenant, frame_bytes(frame))

    def _advance(self, draft: Capture) -> None:
        draft.advance(self._clock.wall)
        if draft.ended:
            self._put_record(draft)

    def _put_record(self, draft: Capture) -> None:
        key = pack_number(draft.number)
        if draft.ended:
            self._quotas.end(draft.description.tenant)
            self._txn.delete(Table.LIVE, key)
            self._txn.put(Table.ENDED, key, draft.manifest().SerializeToString())
        else:
            self._txn.put(Table.LIVE, key, draft.record().SerializeToString())


def _unchanging(frame: memoryview | PlacedFrame, chunk: ChunkView, capture_id: str) -> ChunkView:
    """Return a chunk whose payload its writer cannot change: a copy, if it is in shared memory.

    Raises:
        Failure: CHECKSUM_MISMATCH.
    """
    if not isinstance(frame, PlacedFrame):
        return chunk
    copy = frame.copied()
    if copy is None:
        raise checksum_mismatch(capture_id)
    return copy[1]


def purge_some(txn: Txn, limit: int) -> bool:
    """Free at most `limit` frames of captures that are deleted or moved. Return whether there may be more to free."""
    key = txn.next_key(Table.DOOMED, b"")
    while key is not None and limit > 0:
        is_moved = bytes(txn.get(Table.DOOMED, key) or b"") == records.ROWS_ONLY
        for table in (Table.FRAMES,) if is_moved else (Table.FRAMES, Table.LOSSES, Table.PLACES):
            limit -= txn.delete_some(table, key, limit)
        if limit > 0:
            txn.delete(Table.DOOMED, key)
            limit -= 1  # many captures without frames take time, too
            key = txn.next_key(Table.DOOMED, key + b"\0")
    return key is not None


def _has_ended(manifest: capture_pb2.CaptureManifest) -> Failure:
    capture_id = manifest.description.capture_id
    state = capture_pb2.CaptureState.Name(manifest.state).removeprefix("CAPTURE_STATE_")
    message = f"The capture {capture_id!r} is already sealed or ended (state {state}), so it refuses this change."
    return Failure(Reason.ERROR_REASON_CAPTURE_ENDED, message, capture_id=capture_id, state=state)
