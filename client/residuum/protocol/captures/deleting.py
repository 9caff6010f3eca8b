"""Deletes many captures with few calls. No I/O: both clients use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from residuum import exceptions as exc
from residuum.protocol.captures.many import not_found
from residuum.protocol.failures import from_item_error
from residuum.protocol.requests import RequestLike
from residuum.v1 import store_pb2

CALLS_AT_ONCE = 4
"""Calls at the same time that delete many captures each. More would make the stores' transactions long."""

DELETIONS_AT_ONCE = 16
"""Calls at the same time that find and delete one capture each."""

Outcomes = Mapping[str, "int | exc.ResiduumError"]
"""For each capture the bytes freed, or why it was not deleted."""


def check_deletion(
    requests: RequestLike | Iterable[RequestLike] | None, prefix: str, states: str | Iterable[str], where: str
) -> None:
    """Check that the captures to delete are given either by ID or by a filter that is not empty.

    Raises:
        InvalidRequest: Both are given, or neither.
    """
    if (requests is None) != bool(prefix or states or where):
        raise exc.InvalidRequest(
            "Give either a capture or a list of captures to delete, or a filter that is not empty: prefix=, states= or "
            "where=.",
            reason="INVALID_FIELD",
        )


def deletion_outcomes(capture_ids: Sequence[str], response: store_pb2.DeleteCapturesResponse) -> Outcomes:
    """Return what a store answered for each capture of a call.

    Raises:
        ServerFault: It answered for another number of captures.
    """
    if len(response.results) != len(capture_ids):
        raise exc.ServerFault(
            f"The store answered for {len(response.results)} captures, but the call was to delete {len(capture_ids)}."
        )
    return {
        capture_id: from_item_error(result.error, capture_id=capture_id)
        if result.HasField("error")
        else result.freed_bytes
        for capture_id, result in zip(capture_ids, response.results, strict=True)
    }


def not_deleted(failures: Sequence[exc.ResiduumError], deleted: int, total: int) -> exc.ResiduumError:
    """Return the exception for a deletion of which a part failed. It says how many captures were deleted.

    Args:
        failures: The failure of each capture that was not deleted.
        deleted: How many captures were deleted.
        total: How many captures were to be deleted.
    """
    error = not_found(failures, total)
    if total > 1:
        error.args = (
            f"{error} {deleted or 'None'} of the {total} captures {'was' if deleted <= 1 else 'were'} deleted.",
        )
    return error
