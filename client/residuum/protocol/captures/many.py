"""Reads many captures in one stream. No I/O: both clients use it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from residuum import exceptions as exc
from residuum.protocol.arguments import check_list
from residuum.protocol.caller import warn_caller
from residuum.protocol.captures.reading import Reading, ReadPlan, SharedPayloads
from residuum.protocol.failures import from_item_error
from residuum.protocol.requests import RequestLike, check_capture_id
from residuum.v1 import store_pb2
from residuum.values.captures.activations import Activations
from residuum.values.captures.manifest import Manifest
from residuum.wire.rows.capture_batches import parse_captures
from residuum.wire.rows.frames import FrameError, parse_chunk, placed_view

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_MAX_STREAMS = 4
"""Streams that read captures at the same time. Each may have a shared memory with the store."""

MESSAGE_STREAMS = 2
"""The most if rows come in messages. Threads that receive messages need Python's lock, and asyncio has one thread: with
more streams, a client reads slower."""

_CORES_PER_STREAM = 2
"""A stream keeps about two cores busy: one here, and one in the store if it is on this machine."""

_MIN_PART = 2
"""Captures in a stream. Another stream costs a millisecond or two. But a stream handles its messages one after the
other, so several are faster if captures have megabytes."""

_MAX_NAMED = 10
"""The most captures that a message names; it counts the others."""


def is_many(requests: RequestLike | Iterable[RequestLike]) -> TypeIs[Iterable[RequestLike]]:
    """Tell whether the argument of `activations` is a list of requests rather than one request."""
    is_one = isinstance(requests, (str, bytes, Mapping)) or hasattr(requests, "request_id")
    return isinstance(requests, Iterable) and not is_one


def check_ids(requests: Iterable[RequestLike]) -> list[str]:
    """Return the capture IDs of requests, in order and without repeats.

    Raises:
        UnknownCapture: One is a reply to a request that captured nothing.
        InvalidRequest: One is not an ID.
        TypeError: This is no list, or one is neither a text nor an object with an ID.
    """
    return list(dict.fromkeys(map(check_capture_id, check_list("captures", requests, "requests, replies or IDs"))))


def most_streams(capture_ids: list[str]) -> int:
    """Return how many streams read captures at the same time: one, or several on a machine with many cores."""
    return max(1, min(_MAX_STREAMS, (os.cpu_count() or 1) // _CORES_PER_STREAM, len(capture_ids) // _MIN_PART))


def split_reads(capture_ids: list[str], count: int) -> list[list[str]]:
    """Split captures into parts, one for each stream."""
    return [capture_ids[lane::count] for lane in range(count)]


def check_filter(prefix: str | None, where: str) -> str:
    """Return the prefix of a filter, after checking that the caller gives one. `prefix=""` means all captures.

    Raises:
        InvalidRequest: There is no filter.
    """
    if prefix is None and not where:
        raise exc.InvalidRequest(
            "Which captures? Give a list of them, or a filter: prefix= for the start of their IDs, where= for their "
            "labels. For all captures, pass prefix=''.",
            reason="INVALID_FIELD",
        )
    return prefix or ""


def check_choice(captures: Iterable[RequestLike], prefix: str | None, where: str) -> None:
    """Check that captures are given either as a list or as a filter.

    Raises:
        InvalidRequest: Both are given, or `captures` is one ID.
    """
    if prefix or where or isinstance(captures, str):
        raise exc.InvalidRequest(
            "Give either captures= as a list of IDs, or a filter: prefix= for the start of their IDs, where= for their "
            "labels.",
            reason="INVALID_FIELD",
        )


def check_some(capture_ids: list[str], prefix: str, where: str) -> list[str]:
    """Return the captures that a filter found.

    Raises:
        InvalidRequest: The filter found none.
    """
    if capture_ids:
        return capture_ids
    like = f" whose ID starts with {prefix!r}" if prefix else ""
    labelled = f" with labels {where!r}" if where else ""
    raise exc.InvalidRequest(f"There is no capture{like}{labelled} to read.", reason="INVALID_FIELD")


def warn_of_left_out(manifests: Sequence[Manifest], total: int) -> None:
    """Warn about captures that a filter found but that were left out because they are not complete."""
    if not manifests:
        return
    named = ", ".join(f"{manifest.capture_id} ({manifest.state})" for manifest in manifests[:_MAX_NAMED])
    more = f" and {len(manifests) - _MAX_NAMED} more" if len(manifests) > _MAX_NAMED else ""
    warn_caller(
        f"{len(manifests)} of the {total} captures that match are not complete and were left out: {named}{more}. Use "
        "allow_partial=True to read their present rows, or delete them.",
        exc.LeftOutWarning,
    )


def warn_of_no_rows(capture_ids: Sequence[str], result: str) -> None:
    """Warn that captures have none of the selected positions.

    Args:
        capture_ids: The captures.
        result: What is empty, such as "the result has 0 rows".
    """
    name, count = next(iter(capture_ids)), len(capture_ids)
    which = f"The capture {name} has none" if count == 1 else f"None of the {count} captures has any"
    warn_caller(
        f"{which} of the selected positions, so {result}. Check `positions`, and which positions were captured.",
        exc.EmptyCaptureWarning,
    )


class ManyReading:
    """The state of a read of many captures from one store. After a broken connection, `request` asks for the rest."""

    def __init__(self, plan: ReadPlan, capture_ids: Sequence[str]) -> None:
        """Start with nothing read.

        Args:
            plan: What to read of each capture. Its capture ID is ignored.
            capture_ids: The captures, without repeats, at most as many as one call may name.
        """
        self._plan = plan
        self._left = dict.fromkeys(capture_ids)
        self._asked: list[str] = []
        self._readings: dict[str, Reading] = {}
        self._unknown: dict[str, exc.UnknownCapture] = {}
        self._away: exc.ArchiveUnreachable | None = None
        self._has_progressed = False
        self._memory: SharedPayloads | None = None

    @property
    def left(self) -> Sequence[str]:
        """The captures that were not read to their end yet."""
        return list(self._left)

    def request(self, memory: SharedPayloads | None = None) -> store_pb2.ReadCapturesRequest:
        """Return the request for all captures that are left. Rows that arrived are kept.

        Args:
            memory: The shared memory for large payloads.
        """
        self._asked = list(self._left)
        self._away = None
        self._memory = memory
        for reading in self._readings.values():
            reading.begin()
        of = self._plan.request
        return store_pb2.ReadCapturesRequest(
            capture_ids=self._asked,
            layers=of.layers,
            sites=of.sites,
            sequences=of.sequences,
            positions=of.positions if of.HasField("positions") else None,
            follow=of.follow,
            any_order=True,
            shared_memory_key=b"" if memory is None else memory.key,
        )

    def add(self, data: bytes) -> Iterator[Activations]:
        """Add one message of the stream, and yield the captures that it completes.

        They come in the order of the request, but captures that were open come as they end.

        Raises:
            ResiduumError: A capture cannot be read, or lacks requested rows. See `Reading` for the errors.
        """
        try:
            parts = parse_captures(data)
        except FrameError as error:
            raise exc.DamagedCapture(f"The store sent a damaged message: {error}.") from None
        for rows, chunks in parts:
            acts = self._add(rows, chunks)
            if acts is not None:
                yield acts

    def take_unknown(self) -> dict[str, exc.UnknownCapture]:
        """Return the captures that the store does not have, with its error for each. Each is returned once."""
        unknown, self._unknown = self._unknown, {}
        return unknown

    def take_progress(self) -> bool:
        """Return whether anything but failures that may pass has come since the last call."""
        had_progress, self._has_progressed = self._has_progressed, False
        return had_progress

    def check_done(self) -> None:
        """Check that a stream that ended without an error was complete.

        Raises:
            ArchiveUnreachable: Rows are only in the archive, which does not work. `request` asks for them again.
            ServerFault: It ended before its last capture.
        """
        if self._away is not None:
            raise self._away
        if self._left:
            first = next(iter(self._left))
            raise exc.ServerFault(
                f"The store ended the read before the capture {first}.", metadata={"capture_id": first}
            )

    def explain(self, failure: exc.ResiduumError) -> exc.ResiduumError:
        """Return the exception for a read that failed; see `Reading.explain`."""
        explained = (reading.explain(failure) for reading in self._readings.values())
        return next((better for better in explained if better is not failure), failure)

    def _add(self, part: store_pb2.CaptureRows, chunks: Sequence[memoryview]) -> Activations | None:
        capture_id = self._asked[part.index] if part.index < len(self._asked) else ""
        if part.HasField("error"):
            self._fail(capture_id, part)
            return None
        self._has_progressed = True
        reading = self._readings.get(capture_id)
        if reading is None:
            if capture_id not in self._left:
                raise exc.ServerFault(f"The store sent rows of the capture {capture_id!r}, which it had sent already.")
            reading = self._readings[capture_id] = Reading(self._plan.of(capture_id))
        # In a part, the manifest is before the rows. The part with the last manifest has no rows.
        if part.HasField("manifest"):
            reading.add_manifest(part.manifest)
        try:
            for chunk in chunks:
                reading.add_chunk(parse_chunk(chunk))
            for placed in part.placed_chunks:
                reading.add_chunk(placed_view(placed, self._memory))
        except FrameError as error:
            raise exc.DamagedCapture(
                f"The store sent a damaged chunk: {error}.", metadata={"capture_id": capture_id}
            ) from None
        if not part.is_last:
            return None
        reading.end()
        acts = reading.activations()
        del self._readings[capture_id]
        del self._left[capture_id]
        return acts

    def _fail(self, capture_id: str, part: store_pb2.CaptureRows) -> None:
        failure = from_item_error(part.error, capture_id=capture_id)
        if isinstance(failure, exc.ArchiveUnreachable):
            self._away = failure  # the store goes on with the other captures
            return
        self._has_progressed = True
        if not isinstance(failure, exc.UnknownCapture) or capture_id not in self._left:
            raise failure
        self._unknown[capture_id] = failure
        del self._left[capture_id]


def not_found(failures: Sequence[exc.ResiduumError], total: int) -> exc.ResiduumError:
    """Return the exception for captures that cannot be read. If all are unknown, it names them.

    Args:
        failures: The failure of each capture. The metadata of an UnknownCapture has the capture's ID.
        total: The number of requested captures.
    """
    unknown = [failure for failure in failures if isinstance(failure, exc.UnknownCapture)]
    if len(unknown) < len(failures) or len(failures) == 1:
        return next(failure for failure in failures if failure not in unknown or len(failures) == 1)
    names = [failure.metadata.get("capture_id", "") for failure in unknown]
    more = f", and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return exc.UnknownCapture(
        f"{len(names)} of {total} captures are in no store: {', '.join(names[:_MAX_NAMED])}{more}. They were never "
        "opened, were deleted, or have expired. Leave them out, or list captures (residuum ls).",
        reason="UNKNOWN_CAPTURE",
        metadata={"capture_id": names[0], "capture_ids": ",".join(names)},
    )
