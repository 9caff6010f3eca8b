"""Opens and seals captures: the calls OpenCapture, OpenCaptures, SealCapture and SealCaptures."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import grpc

from residuum.rpc.errors import Failure
from residuum.rpc.methods import QUEUED
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import MAX_CAPTURES_PER_OPEN
from store_svc.captures.capture_names import (
    CaptureName,
    capture_exists,
    foreign_tenant,
    name_of,
    unknown_capture,
    written_tenant,
)
from store_svc.captures.lifecycle import Wait
from store_svc.checks import check_description, check_number, invalid
from store_svc.item_errors import item_error
from store_svc.writing.changes import Batch
from svc_common.security.access import current_caller

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from store_svc.calls import Calls
    from store_svc.captures.catalog import Catalog, Feed
    from store_svc.traces import CaptureTraces
    from store_svc.writing.early_rows import ArrivedOpens
    from store_svc.writing.writer import Writer
    from svc_common.security.tokens_file import Caller

_ROWS_SECONDS = 3.0
"""How long an open waits for rows in flight of a capture that the caller may skip. Its own callers wait 5 s."""


class _Opening(NamedTuple):
    """A capture to open, whose description has been checked."""

    at: int
    """Its index in the call."""
    name: CaptureName
    description: capture_pb2.CaptureDescription
    if_exists: capture_pb2.IfExists.ValueType
    holder: str
    """Whose lease the open renews; see `Leases.renew`."""

    def apply(self, batch: Batch) -> capture_pb2.CaptureManifest | None:
        """Open the capture; see `Batch.open`."""
        return batch.open(self.description, self.if_exists, self.holder)


class Openings:
    """Answers the calls that open captures."""

    def __init__(
        self, writer: Writer, catalog: Catalog, calls: Calls, traces: CaptureTraces, opens: ArrivedOpens
    ) -> None:
        """Answer calls with these parts of a store. `opens` is told which opens have arrived."""
        self._writer = writer
        self._catalog = catalog
        self._calls = calls
        self._traces = traces
        self._opens = opens

    def open(
        self, request: store_pb2.OpenCaptureRequest, context: grpc.ServicerContext
    ) -> store_pb2.OpenCaptureResponse:
        """Answer OpenCapture; see store.proto."""
        opening = self._checked(current_caller(), request)
        if opening is None:
            return store_pb2.OpenCaptureResponse()
        self._wait_for_rows(opening, context)
        is_new = self._is_new(opening)
        (future,) = self._submit([opening])
        if is_new:
            with suppress(grpc.RpcError):  # the caller has gone
                context.send_initial_metadata(((QUEUED, "1"),))
        return self._opened(opening, future)

    def open_many(self, request: store_pb2.OpenCapturesRequest) -> Iterator[store_pb2.OpenCapturesResponse]:
        """Answer OpenCaptures; see store.proto."""
        check_number("opens", len(request.opens), MAX_CAPTURES_PER_OPEN, "takes")
        caller = current_caller()
        first = store_pb2.OpenCapturesResponse(takes_early_rows=True)
        openings = []
        for index, item in enumerate(request.opens):
            with _recording(first, index):
                opening = self._checked(caller, item, index)
                if opening is None:
                    first.results.add(index=index).opened.SetInParent()
                elif opening.if_exists == capture_pb2.IF_EXISTS_SKIP:
                    self._opens.note([opening.description.attempt])
                    # It may wait for rows, which takes a slot of the readers, and its answer may fill a message.
                    raise invalid("if_exists", "OpenCaptures skips no existing captures. Use OpenCapture.")
                else:
                    openings.append(opening)
        first.queued.extend(opening.at for opening in openings if self._is_new(opening))
        futures = self._submit(openings)
        yield first
        if openings:
            yield self._results(openings, futures)

    def _checked(self, caller: Caller, request: store_pb2.OpenCaptureRequest, index: int = 0) -> _Opening | None:
        """Check a request. Return None if it is only a check.

        Raises:
            Failure: The description is malformed, or of another tenant; or the capture exists, for a check.
        """
        try:
            return self._check(caller, request, index)
        except Failure:
            self._opens.note([request.description.attempt])
            raise

    def _check(self, caller: Caller, request: store_pb2.OpenCaptureRequest, index: int) -> _Opening | None:
        description = request.description
        tenant = written_tenant(caller, description.tenant)
        if tenant is None:
            raise foreign_tenant(description.tenant)
        description.tenant = tenant
        check_description(description)
        name = name_of(description)
        if not request.check_only:
            return _Opening(index, name, description, request.if_exists, caller.holder)
        state = self._catalog.state_of(name)
        if state is not None:
            raise capture_exists(description.capture_id, state)
        return None

    def _is_new(self, opening: _Opening) -> bool:
        """Tell whether rows may be sent before the commit. An open of a known ID is usually refused, so it waits."""
        return self._catalog.state_of(opening.name) is None

    def _submit(self, openings: Sequence[_Opening]) -> list[Future[capture_pb2.CaptureManifest | None]]:
        futures = self._writer.submit_many([(opening.name.capture_id, opening.apply) for opening in openings])
        self._opens.note(opening.description.attempt for opening in openings)
        return futures

    def _opened(
        self, opening: _Opening, future: Future[capture_pb2.CaptureManifest | None]
    ) -> store_pb2.OpenCaptureResponse:
        """Wait for the commit, and return the answer."""
        existing = future.result()
        if existing is not None:
            return store_pb2.OpenCaptureResponse(existing=existing)
        self._traces.opened(opening.name)  # after the open: a refused one must not be recorded
        response = store_pb2.OpenCaptureResponse()
        if opening.description.service_instance:
            response.lease.FromNanoseconds(round(self._catalog.leases.seconds * 1e9))
        return response

    def _results(
        self, openings: Iterable[_Opening], futures: Iterable[Future[capture_pb2.CaptureManifest | None]]
    ) -> store_pb2.OpenCapturesResponse:
        """Wait for the commit, and return the results of openings."""
        response = store_pb2.OpenCapturesResponse()
        for opening, future in zip(openings, futures, strict=True):
            with _recording(response, opening.at):
                opened = self._opened(opening, future)
                response.results.add(index=opening.at, opened=opened)
        return response

    def _wait_for_rows(self, opening: _Opening, context: grpc.ServicerContext) -> None:
        """Wait briefly for rows of a sealed capture, so that it can be skipped if it is complete.

        Raises:
            Failure: LIMIT_REACHED: too many calls read or wait.
        """
        feed = self._catalog.feed_named(opening.name)
        if opening.if_exists == capture_pb2.IF_EXISTS_SKIP and feed is not None and feed.capture.wait is Wait.ROWS:
            with self._calls.reading(opening.holder):
                wait_for_feed(self._catalog, feed, _ROWS_SECONDS, context)


def wait_for_feed(catalog: Catalog, feed: Feed, seconds: float, context: grpc.ServicerContext) -> None:
    """Wait until a capture has ended or was deleted, the store stops, or the caller has gone."""
    context.add_callback(feed.wake)
    with feed.condition:
        feed.condition.wait_for(
            lambda: feed.capture.ended or feed.deleted or catalog.stopping or not context.is_active(), seconds
        )


@contextmanager
def _recording(response: store_pb2.OpenCapturesResponse, index: int) -> Iterator[None]:
    """Record a Failure as the result of a capture.

    Raises:
        Failure: NOT_SERVING: the store is stopping, so the whole call fails.
    """
    try:
        yield
    except Failure as failure:
        response.results.add(index=index, error=item_error(failure))


def seal(writer: Writer, request: store_pb2.SealCaptureRequest) -> store_pb2.SealCaptureResponse:
    """Answer SealCapture; see store.proto."""
    name = _sealed_name(current_caller(), request)

    def change(batch: Batch) -> capture_pb2.CaptureManifest:
        batch.seal(name, request)
        return batch.manifest(name)

    manifest = writer.call(request.capture_id, change, reserve=True)
    return store_pb2.SealCaptureResponse(manifest=manifest)


def seal_many(writer: Writer, request: store_pb2.SealCapturesRequest) -> store_pb2.SealCapturesResponse:
    """Answer SealCaptures; see store.proto."""
    check_number("seals", len(request.seals), MAX_CAPTURES_PER_OPEN, "takes")
    caller = current_caller()
    response = store_pb2.SealCapturesResponse()
    changes, results = [], []
    for item in request.seals:
        result = response.results.add()
        try:
            name = _sealed_name(caller, item)
        except Failure as failure:
            result.error.CopyFrom(item_error(failure))
        else:
            changes.append((name.capture_id, partial(Batch.seal, name=name, seal=item)))
            results.append(result)
    for result, future in zip(results, writer.submit_many(changes, reserve=True), strict=True):
        try:
            future.result()
        except Failure as failure:
            result.error.CopyFrom(item_error(failure))
    return response


def _sealed_name(caller: Caller, request: store_pb2.SealCaptureRequest) -> CaptureName:
    """Return the name of the capture to seal.

    Raises:
        Failure: UNKNOWN_CAPTURE if the caller may not act for its tenant.
    """
    tenant = written_tenant(caller, request.tenant)
    if tenant is None:
        raise unknown_capture(request.capture_id)
    request.tenant = tenant  # the writer keeps the request and compares a repeated seal with it
    return CaptureName(tenant, request.capture_id)
