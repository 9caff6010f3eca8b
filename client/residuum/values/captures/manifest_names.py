"""The names and times in manifests, from the contract's numbers."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from google.protobuf import timestamp_pb2

from residuum.v1 import capture_pb2
from residuum.values.selections.points import SITE_NAMES

STATES: dict[capture_pb2.CaptureState.ValueType, str] = {
    capture_pb2.CAPTURE_STATE_OPEN: "open",
    capture_pb2.CAPTURE_STATE_COMPLETE: "complete",
    capture_pb2.CAPTURE_STATE_INCOMPLETE: "incomplete",
    capture_pb2.CAPTURE_STATE_ABORTED: "aborted",
}
"""The states of a capture by their names in Python."""

ARCHIVE_STATES: dict[capture_pb2.ArchiveState.ValueType, str] = {
    capture_pb2.ARCHIVE_STATE_PENDING: "pending",
    capture_pb2.ARCHIVE_STATE_COPIED: "copied",
    capture_pb2.ARCHIVE_STATE_MOVED: "moved",
}
"""The places of a capture's rows by their names in Python."""

FINAL_STATES = frozenset({"complete", "incomplete", "aborted"})


def name_of(names: Mapping[str, int], number: int) -> str:
    """Return the name of a number; the first name for 0, and "unknown" if this version does not know the number."""
    return next((name for name, known in names.items() if known == (number or 1)), "unknown")


def site_name(site: capture_pb2.Site.ValueType) -> str:
    """Return a site's name, or "site N" if this version does not know its number N."""
    return SITE_NAMES.get(site, f"site {int(site)}")


def to_datetime(time: timestamp_pb2.Timestamp) -> datetime.datetime | None:
    """Return a time in UTC, or None if it is not set."""
    if not time.seconds and not time.nanos:
        return None
    return time.ToDatetime(tzinfo=datetime.timezone.utc)


def reason_name(reason: capture_pb2.IncompleteReason.ValueType) -> str:
    """Return why a capture is incomplete; empty if it is not, or if this version does not know the reason."""
    if reason not in capture_pb2.IncompleteReason.values() or not reason:
        return ""
    return capture_pb2.IncompleteReason.Name(reason).removeprefix("INCOMPLETE_REASON_")
