"""Outcomes of the items of a call that handles many captures: which failures are of one item, and which of the call."""

from __future__ import annotations

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import errors_pb2

_OF_THE_CALL = {Reason.ERROR_REASON_NOT_SERVING, Reason.ERROR_REASON_ABORTED}
"""The store is stopping, or the caller has cancelled. Nothing more can be done for any item, so the call fails: callers
then handle it as they handle every store that does not answer."""


def item_error(failure: Failure) -> errors_pb2.ItemError:
    """Return a failure as the outcome of one item, so that the call goes on with the others.

    Raises:
        Failure: This failure, if it is one of the whole call.
    """
    if failure.reason in _OF_THE_CALL:
        try:
            raise failure
        finally:
            del failure  # with its traceback, it would be in a cycle that holds the shared memory of the read
    return failure.to_item_error()
