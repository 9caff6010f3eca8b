"""Deadlines, and requests about captures. No I/O: both clients use it."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Mapping
from numbers import Real

from residuum.exceptions import InvalidRequest
from residuum.protocol.arguments import check_flag, check_integer, check_text, check_texts, short
from residuum.protocol.requests import whole_characters
from residuum.v1 import store_pb2
from residuum.values.captures.capture import check_mapping, label_list
from residuum.values.captures.manifest_names import STATES
from residuum.wire.labels import LabelError, LabelValue, parse_where
from residuum.wire.limits import MAX_PAGE_SIZE

_SLICE_SECONDS = 20.0
"""The longest wait that one call asks for. A long wait takes several calls, so that a dead peer is noticed."""

_LONGEST_SECONDS = 1e9
"""The longest timeout that counts, about 30 years. gRPC takes the end of one of 1e10 seconds for a time in the past."""


def call_seconds(timeout: float | None) -> float | None:
    """Return the timeout of a call after checking it; None, no limit, for one that is too long to be reached.

    Raises:
        TypeError: The timeout is neither a number nor None.
        InvalidRequest: It is NaN.
    """
    if timeout is None:
        return None
    if not _is_number(timeout):
        raise TypeError(f"timeout must be a number of seconds, or None for no limit, not {short(timeout)}.")
    if math.isnan(timeout):
        raise InvalidRequest(
            "timeout must be a number of seconds, or None for no limit, not NaN.",
            reason="INVALID_FIELD",
            metadata={"field": "timeout"},
        )
    return None if timeout > _LONGEST_SECONDS else float(timeout)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class Deadline:
    """The time at which something must be done, or no such time."""

    def __init__(self, seconds: float | None) -> None:
        seconds = call_seconds(seconds)
        self._end = None if seconds is None else time.monotonic() + seconds

    @classmethod
    def of_wait(cls, wait: bool | float) -> Deadline:  # noqa: FBT001 - as the user wrote it
        """Return the deadline for an argument `wait=`. True means no deadline, False means now.

        Raises:
            TypeError: It is neither a bool nor a number.
            InvalidRequest: The number of seconds is below 0.
        """
        if wait is True:
            return cls(None)
        told = f"wait must be True, False or a number of seconds of at least 0, not {short(wait)}."
        if wait is not False and not _is_number(wait):
            raise TypeError(told)
        if not wait >= 0:
            raise InvalidRequest(told, reason="INVALID_FIELD")
        return cls(float(wait))

    def remaining(self) -> float | None:
        """Return the seconds that are left, at least 0; None without a deadline."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def slice(self) -> float:
        """Return the seconds that the next call may wait."""
        left = self.remaining()
        return _SLICE_SECONDS if left is None else min(left, _SLICE_SECONDS)

    def is_over(self) -> bool:
        """Tell whether the deadline has passed."""
        return self.remaining() == 0.0


@whole_characters()
def list_request(
    prefix: str, states: str | Iterable[str], where: str = "", page_size: int = MAX_PAGE_SIZE
) -> store_pb2.ListCapturesRequest:
    """Build the request for the first page of captures.

    Raises:
        InvalidRequest: A state does not exist, the page size is out of range, or `where` cannot be parsed.
        TypeError: An argument has the wrong type.
    """
    check_integer("page_size", page_size, 1, MAX_PAGE_SIZE)
    check_text("prefix", prefix)
    check_text("where", where)
    numbers = {name: number for number, name in STATES.items()}
    names = check_texts("states", states)
    for name in names:
        if name not in numbers:
            raise InvalidRequest(
                f"{name!r} is not a state of a capture. Choose among {', '.join(numbers)}.", reason="INVALID_FIELD"
            )
    try:
        parse_where(where)
    except LabelError as error:
        raise InvalidRequest(f"where: {error}", reason="INVALID_FIELD", metadata={"field": "where"}) from None
    return store_pb2.ListCapturesRequest(
        prefix=prefix, states=[numbers[name] for name in names], where=where, page_size=page_size
    )


@whole_characters()
def label_request(capture_id: str, labels: Mapping[str, LabelValue | None]) -> store_pb2.LabelCaptureRequest:
    """Build the request to change a capture's labels. A value of None removes the label.

    Raises:
        InvalidRequest: A label is invalid.
        TypeError: A value is not a text, number, bool or None.
    """
    given = {name: value for name, value in check_mapping(labels).items() if value is not None}
    removed = [name for name, value in labels.items() if value is None]
    return store_pb2.LabelCaptureRequest(capture_id=capture_id, labels=label_list(given), removed_names=removed)


def get_request(capture_id: str, wait: float, *, archived: bool = False) -> store_pb2.GetCaptureRequest:
    """Build the request for a manifest.

    The store waits up to `wait` seconds for the capture to end, and with `archived` until it is in the archive, too.
    """
    request = store_pb2.GetCaptureRequest(capture_id=capture_id, wait_for_archive=check_flag("archived", archived))
    if wait:
        request.wait.FromTimedelta(datetime.timedelta(seconds=wait))
    return request
