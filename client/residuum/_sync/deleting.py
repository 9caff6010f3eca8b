# Generated from client/residuum/_async/deleting.py by scripts/generate_sync.py. Edit that file, then run `make sync`.
"""How the synchronous client deletes captures."""

from __future__ import annotations

from collections.abc import Sequence

from residuum import exceptions as exc
from residuum._sync import io
from residuum._sync.stores import StoreClient
from residuum.protocol.captures.deleting import (
    CALLS_AT_ONCE,
    DELETIONS_AT_ONCE,
    Outcomes,
    deletion_outcomes,
    not_deleted,
)
from residuum.transport.failures import is_unknown_call
from residuum.v1 import store_pb2
from residuum.wire.limits import MAX_CAPTURES_PER_DELETION


class DeletionClient(StoreClient):
    """The deletion of captures by ID; the base class of `CaptureClient`."""

    def _delete(self, capture_id: str) -> int:
        """Delete a capture, and return the bytes freed."""
        request = store_pb2.DeleteCaptureRequest(capture_id=capture_id)

        def ask(endpoint: str) -> int:
            answer = self._call(endpoint, self._store(endpoint).DeleteCapture, request, capture_id=capture_id)
            return answer.freed_bytes

        return self._ask_holder(capture_id, ask)

    def _delete_many(self, capture_ids: Sequence[str], *, may_be_gone: bool) -> int:
        """Delete captures and return the bytes freed. `may_be_gone`: a capture that does not exist is no error."""
        outcomes = self._delete_each(capture_ids).values()
        failures = [outcome for outcome in outcomes if isinstance(outcome, exc.ResiduumError)]
        if may_be_gone:
            failures = [failure for failure in failures if not isinstance(failure, exc.UnknownCapture)]
        freed = [outcome for outcome in outcomes if isinstance(outcome, int)]
        if failures:
            raise not_deleted(failures, len(freed), len(capture_ids))
        return sum(freed)

    def _delete_each(self, capture_ids: Sequence[str]) -> Outcomes:
        """Delete captures, which are given without repeats. Return the outcome of each, in order.

        The likely store of each capture is asked first, for many captures with one call. Captures that it does not have
        are then searched for one by one.
        """
        if not capture_ids:
            return {}
        known = self._known_stores()
        groups = self._stores.by_likely_store(capture_ids, known, MAX_CAPTURES_PER_DELETION)
        answers = io.call_each(self._delete_group, groups, CALLS_AT_ONCE)
        outcomes: dict[str, int | exc.ResiduumError] = {}
        for (_, names), answer in zip(groups, answers, strict=True):
            outcomes.update(dict.fromkeys(names, answer) if isinstance(answer, exc.ResiduumError) else answer)
        left = self._not_decided(outcomes)
        for name, outcome in zip(left, io.call_each(self._delete, left, DELETIONS_AT_ONCE), strict=True):
            # If the first call broke off, the store may have deleted the capture nevertheless.
            if not (isinstance(outcome, exc.UnknownCapture) and _broke_off(outcomes[name])):
                outcomes[name] = outcome
        return {name: outcomes[name] for name in capture_ids}

    def _delete_group(self, group: tuple[str, Sequence[str]]) -> Outcomes:
        """Delete captures in the store with an endpoint."""
        endpoint, names = group
        request = store_pb2.DeleteCapturesRequest(capture_ids=names)
        return deletion_outcomes(names, self._call(endpoint, self._store(endpoint).DeleteCaptures, request))

    def _not_decided(self, outcomes: Outcomes) -> list[str]:
        """Return the captures that may be in another store than the likely one, or whose store is too old."""
        missed = [name for name, outcome in outcomes.items() if isinstance(outcome, exc.UnknownCapture)]
        if missed and not self._may_be_elsewhere(missed):
            missed = []
        silent = [name for name, outcome in outcomes.items() if _broke_off(outcome) and not self._stores.known(name)]
        return [*missed, *silent, *(name for name, outcome in outcomes.items() if _is_from_old_store(outcome))]


def _is_from_old_store(outcome: int | exc.ResiduumError) -> bool:
    return isinstance(outcome, exc.ResiduumError) and is_unknown_call(outcome)


def _broke_off(outcome: int | exc.ResiduumError) -> bool:
    """Tell whether a store did not answer a deletion."""
    return isinstance(outcome, (exc.Unavailable, exc.DeadlineExceeded))
