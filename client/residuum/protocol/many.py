"""Reading many captures in one stream: what is left to read, and what has come. No I/O: both clients use it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from residuum import exceptions as exc
from residuum.protocol.failures import from_item_error
from residuum.protocol.reading import Reading, ReadPlan, SharedPayloads
from residuum.protocol.requests import RequestLike, check_capture_id
from residuum.v1 import store_pb2
from residuum.values.activations import Activations
from residuum.values.manifest import Manifest
from residuum.wire.frames import FrameError, chunk_view, placed_view

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_NAMED = 10
"""Captures that a message names; the others are counted."""


def is_many(requests: RequestLike | Iterable[RequestLike]) -> TypeIs[Iterable[RequestLike]]:
    """Tell whether the argument of `activations` is a list of requests, not one."""
    is_one = isinstance(requests, (str, bytes, Mapping)) or hasattr(requests, "request_id")
    return isinstance(requests, Iterable) and not is_one


def check_ids(requests: Iterable[RequestLike]) -> list[str]:
    """Return the IDs of some requests, each once, in order.

    Raises:
        UnknownCapture: One is a reply to a request that captured nothing.
        InvalidRequest: One is not an ID.
    """
    return list(dict.fromkeys(map(check_capture_id, requests)))


def check_choice(captures: Iterable[RequestLike], prefix: str, where: str) -> None:
    """Check that captures are named in one way.

    Raises:
        InvalidRequest: They are named in two ways, or `captures` is one ID.
    """
    if prefix or where or isinstance(captures, str):
        raise exc.InvalidRequest(
            "Give either captures= as a list of IDs, or the beginning of their IDs as prefix= and a filter on their "
            "labels as where=.",
            reason="INVALID_FIELD",
        )


def check_some(capture_ids: list[str], prefix: str, where: str) -> list[str]:
    """Return the captures that a filter found.

    Raises:
        InvalidRequest: It found none.
    """
    if capture_ids:
        return capture_ids
    like = f" whose id begins with {prefix!r}" if prefix else ""
    labelled = f" with labels {where!r}" if where else ""
    raise exc.InvalidRequest(f"There is no capture{like}{labelled} to read.", reason="INVALID_FIELD")


def warn_of_left_out(manifests: Sequence[Manifest], total: int) -> None:
    """Warn if captures that a filter found were left out because they are not complete."""
    if not manifests:
        return
    named = ", ".join(f"{manifest.capture_id} ({manifest.state})" for manifest in manifests[:_NAMED])
    more = f" and {len(manifests) - _NAMED} more" if len(manifests) > _NAMED else ""
    warnings.warn(
        f"{len(manifests)} of the {total} captures that match are not complete and were left out: {named}{more}. Use "
        "allow_partial=True to have their present rows, or delete them.",
        exc.LeftOutWarning,
        stacklevel=3,
    )


class ManyReading:
    """What has come of some captures of one store. After a broken connection, `request` asks for the others again."""

    def __init__(self, plan: ReadPlan, capture_ids: Sequence[str]) -> None:
        """Begin.

        Args:
            plan: What to read of each capture; its own ID does not matter.
            capture_ids: The captures, each once, as many as one call may name.
        """
        self._plan = plan
        self._left = list(capture_ids)
        self._asked: list[str] = []
        self._reading: Reading | None = None
        self._unknown: dict[str, exc.UnknownCapture] = {}
        self._memory: SharedPayloads | None = None

    @property
    def left(self) -> Sequence[str]:
        """The captures that have not come."""
        return self._left

    def request(self, memory: SharedPayloads | None = None) -> store_pb2.ReadCapturesRequest:
        """Return the message for all captures that have not come. What has come of the first of them is kept.

        Args:
            memory: The shared memory for large payloads.
        """
        self._asked = list(self._left)
        self._memory = memory
        if self._reading is not None:
            self._reading.begin()
        of = self._plan.request
        return store_pb2.ReadCapturesRequest(
            capture_ids=self._asked,
            layers=of.layers,
            sites=of.sites,
            sequences=of.sequences,
            positions=of.positions if of.HasField("positions") else None,
            follow=of.follow,
            shared_memory_key=b"" if memory is None else memory.key,
        )

    def add(self, data: bytes) -> Iterator[Activations]:
        """Take one message of the stream; yield the captures that it completes, in the order of the request.

        Raises:
            ResiduumError: A capture cannot be read, or is not what was asked for. See `Reading` for which errors.
        """
        try:
            response = store_pb2.ReadCapturesResponse.FromString(data)
        except DecodeError as error:
            raise exc.DamagedCapture(f"The store sent a damaged message: {error}.") from None
        for part in response.captures:
            acts = self._add(part)
            if acts is not None:
                yield acts

    def take_unknown(self) -> dict[str, exc.UnknownCapture]:
        """Return the captures that the store does not have, and what it says of each; each is returned once."""
        unknown, self._unknown = self._unknown, {}
        return unknown

    def check_done(self) -> None:
        """Check that the stream has ended well.

        Raises:
            ServerFault: It ended before its last capture.
        """
        if self._left:
            raise exc.ServerFault(
                f"The store ended the read before the capture {self._left[0]}.", metadata={"capture_id": self._left[0]}
            )

    def explain(self, failure: exc.ResiduumError) -> exc.ResiduumError:
        """Return what to raise for a read that failed; see `Reading.explain`."""
        return failure if self._reading is None else self._reading.explain(failure)

    def _add(self, part: store_pb2.CaptureRows) -> Activations | None:
        capture_id = self._asked[part.index] if part.index < len(self._asked) else ""
        if part.HasField("error"):
            self._fail(capture_id, part)
            return None
        if not self._left or capture_id != self._left[0]:
            raise exc.ServerFault(f"The store sent rows of the capture {capture_id!r}, which was not next.")
        if self._reading is None:
            self._reading = Reading(self._plan.of(capture_id))
        reading = self._reading
        # A manifest is before the rows of its part, except for the last one: that part has no rows.
        if part.HasField("manifest"):
            reading.add_manifest(part.manifest)
        try:
            for chunk in part.chunks:
                reading.add_chunk(chunk_view(chunk))
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
        self._reading = None
        self._left.pop(0)
        return acts

    def _fail(self, capture_id: str, part: store_pb2.CaptureRows) -> None:
        failure = from_item_error(part.error, capture_id=capture_id)
        if not isinstance(failure, exc.UnknownCapture) or capture_id not in self._left:
            raise failure
        self._unknown[capture_id] = failure
        self._left.remove(capture_id)


def not_found(failures: Sequence[exc.ResiduumError], total: int) -> exc.ResiduumError:
    """Return what to raise for captures that cannot be read: for unknown ones an exception that names them.

    Args:
        failures: What is known of each; the metadata of UnknownCapture has the capture's ID.
        total: How many captures were asked for.
    """
    unknown = [failure for failure in failures if isinstance(failure, exc.UnknownCapture)]
    if len(unknown) < len(failures) or len(failures) == 1:
        return next(failure for failure in failures if failure not in unknown or len(failures) == 1)
    names = [failure.metadata.get("capture_id", "") for failure in unknown]
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return exc.UnknownCapture(
        f"{len(names)} of {total} captures are in no store: {', '.join(names[:_NAMED])}{more}. They were never opened, "
        "were deleted, or have expired. Leave them out, or list captures (residuum ls).",
        reason="UNKNOWN_CAPTURE",
        metadata={"capture_id": names[0], "capture_ids": ",".join(names)},
    )
