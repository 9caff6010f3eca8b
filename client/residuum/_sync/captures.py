# Generated from client/residuum/_async/captures.py by scripts/generate_sync.py. Edit that file, then run `make sync`.
"""The synchronous client's methods for captures: activations, manifests and lists."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from residuum import exceptions as exc
from residuum._sync import io
from residuum._sync.deleting import DeletionClient
from residuum.exports.job import Export, ExportJob
from residuum.protocol.arguments import check_flag
from residuum.protocol.caller import warn_caller
from residuum.protocol.captures.deleting import check_deletion
from residuum.protocol.captures.listing import Listing, check_place, read_token
from residuum.protocol.captures.many import (
    MESSAGE_STREAMS,
    check_choice,
    check_filter,
    check_ids,
    check_some,
    is_many,
    most_streams,
    split_reads,
    warn_of_left_out,
    warn_of_no_rows,
)
from residuum.protocol.captures.reading import Piece, Reading, ReadPlan, plan_read, warn_if_empty
from residuum.protocol.captures.stores import silent_store
from residuum.protocol.captures.tenants import tenant_of
from residuum.protocol.deadlines import Deadline, get_request, label_request, list_request
from residuum.protocol.requests import RequestLike, check_capture_id
from residuum.transport.connections import ReadRetries
from residuum.transport.progress import progress_bar
from residuum.v1 import store_pb2
from residuum.values.captures.activations import Activations
from residuum.values.captures.manifest import Manifest
from residuum.values.captures.rows import Rows, RowsBuilder, in_order
from residuum.values.replies.capture_summaries import CapturePage, CaptureSummary
from residuum.values.replies.service_status import StoreStats
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike
from residuum.wire.labels import LabelValue, to_dict
from residuum.wire.placement import StoreAddress

if TYPE_CHECKING:
    from typing_extensions import Self


class CaptureClient(DeletionClient):
    """The methods that read, list and delete captures; the base class of `SearchClient`."""

    @overload
    def activations(  # type: ignore[overload-overlap] # a str is one request, although it is iterable
        self,
        request_id: RequestLike,
        *,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        wait: bool = True,
        timeout: float | None = None,
        allow_partial: bool = False,
        progress: bool = False,
    ) -> Activations: ...

    @overload
    def activations(
        self,
        request_id: Iterable[RequestLike],
        *,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        wait: bool = True,
        timeout: float | None = None,
        allow_partial: bool = False,
        progress: bool = False,
    ) -> list[Activations]: ...

    def activations(
        self,
        request_id: RequestLike | Iterable[RequestLike],
        *,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        wait: bool = True,
        timeout: float | None = None,
        allow_partial: bool = False,
        progress: bool = False,
    ) -> Activations | list[Activations]:
        """Return the captured rows of one request, or of a list of requests, once their captures have ended.

        To read many captures, pass a list: they share one stream, or a few on a machine with many cores. That is far
        faster than one call for each.

        If the store is away, the client retries until the timeout, and then continues where it stopped. Without a
        timeout, it retries for 5 minutes, or for the client's own timeout (30 seconds) if it has never reached this
        store. It verifies the checksums of all rows.

        Args:
            request_id: The request: its ID, its reply, or anything else that has its ID; or a list of requests.
            layers: Only these layers; None means all captured layers.
            sites: Only these sites, as a list or separated by commas; None means all.
            sequences: Only these sequences; None means all.
            positions: Only these positions; None means all. See `Positions.of`.
            wait: Wait until the capture has ended. Otherwise an open capture raises OpenCapture.
            timeout: The most seconds to wait and read; None means no limit.
            allow_partial: Return the rows that an open, incomplete or aborted capture has, and NaN for the missing
                ones; `present` says which are missing.
            progress: Show a progress bar, on a terminal or in Jupyter.

        Returns:
            The activations of the request. For a list, a list in the same order.

        Raises:
            IncompleteCapture: Rows are missing and will not arrive; the exception's manifest says which and why.
            AbortedCapture: The request was aborted.
            OpenCapture: `wait` is false and the capture is still being written.
            UnknownCapture: The capture does not exist: the request captured nothing, or the capture was deleted or has
                expired, or was replaced while it was read. For a list, the message names those that do not exist.
            InvalidRequest: A layer or site was not captured.
            DeadlineExceeded: The timeout expired.
            Unreachable: The store was away until the timeout, or one side refused the other's certificate.

        Warns:
            EmptyCaptureWarning: The request has none of the selected positions, such as position 5000 of a shorter
                request. Then the activations have 0 rows, and their mean is NaN.

        Example:
            >>> acts = client.activations(reply.request_id, layers=[12])
            >>> acts[12].mean(axis=0).shape
            (576,)
            >>> replies = client.generate_many(prompts, capture=residuum.Capture(layers=[12]))
            >>> means = [acts[12].mean(axis=0) for acts in client.activations(replies)]
        """
        choice: dict[str, Any] = {
            "layers": layers, "sites": sites, "sequences": sequences, "positions": positions,
            "follow": wait, "allow_partial": allow_partial,
        }  # fmt: skip
        if is_many(request_id):
            names = [check_capture_id(item) for item in request_id]
            plan = plan_read(names[0], **choice) if names else None
            found = self._activations_of(names, plan, timeout, progress=progress)
            for acts in found:
                warn_if_empty(acts)
            return in_order(names, found)
        reading = Reading(plan_read(request_id, **choice))
        name = reading.request.capture_id
        with progress_bar(f"reading {name}", None, enabled=progress, of_bytes=True) as advance:
            for data in self._read(reading, timeout):
                reading.add(data)
                advance(reading.take_bytes())
        acts = reading.activations()
        warn_if_empty(acts)
        return acts

    def rows(
        self,
        captures: Iterable[RequestLike] | None = None,
        *,
        layer: int,
        site: str = "resid_post",
        prefix: str | None = None,
        where: str = "",
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        timeout: float | None = None,
        allow_partial: bool = False,
        progress: bool = False,
    ) -> Rows:
        """Return the rows of one layer of many captures as one array, with the origin of each row.

        The captures share one or a few streams. All rows must fit into memory; `ActivationDataset` can read more than
        that.

        Args:
            captures: The captures, as requests, replies or IDs; the rows have their order. One that is named twice is
                read once. None reads the captures that `prefix` and `where` select, in the order of their IDs.
            layer: The layer.
            site: The site.
            prefix: Without `captures`: all captures whose ID starts with this; "" means all captures. The client waits
                for open captures to end. It leaves out incomplete and aborted ones with a warning, unless
                `allow_partial` is true.
            where: Without `captures`: only captures whose labels match this, such as "split = train and y >= 2".
            sequences: Only these sequences; None means all.
            positions: Only these positions; None means all. See `Positions.of`.
            timeout: The most seconds to wait and read; None means no limit.
            allow_partial: Return the present rows of captures that are not complete.
            progress: Show a progress bar, on a terminal or in Jupyter.

        Returns:
            The rows; `values` is float32 [rows, width].

        Raises:
            InvalidRequest: No capture matches; `captures` and a filter are both given or both missing; a capture lacks
                the layer or site; rows differ in width, or the captures in model, adapter, encoding, reduction or
                `before_steering`; or an admin's filter selects captures of several tenants. The other errors are those
                of `activations`.

        Warns:
            LeftOutWarning: Captures that `prefix` and `where` select are not complete, and were left out.
            EmptyCaptureWarning: No capture has any of the selected positions.

        Example:
            >>> train = client.rows(where="split = train", layer=12, positions="last_prompt")
            >>> train.values.shape, train.labels("y")[:3]
            ((500, 576), [1, 0, 0])
        """
        builder = RowsBuilder(layer, site)
        deadline = Deadline(timeout)
        client, names = self._chosen(captures, prefix, where, deadline)
        leaves_out = captures is None and not allow_partial
        choice: dict[str, Any] = {
            "layers": layer, "sites": site, "sequences": sequences, "positions": positions,
            "follow": True, "allow_partial": allow_partial or leaves_out,
        }  # fmt: skip
        plan = plan_read(names[0], **choice) if names else None
        found = client._activations_of(  # noqa: SLF001 - this client, for a tenant
            names, plan, deadline.remaining(), progress=progress
        )
        left_out = []
        for acts in in_order(names, found):
            if leaves_out and acts.manifest.state != "complete":
                left_out.append(acts.manifest)
            else:
                builder.add(acts)
        warn_of_left_out(left_out, len(names))
        rows = builder.rows()
        if rows.captures and not rows:
            warn_of_no_rows(rows.captures, "the result has 0 rows")
        return rows

    def export(
        self,
        request_id: RequestLike,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002 - the natural name for users
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        wait: bool = True,
        timeout: float | None = None,
        allow_partial: bool = False,
        overwrite: bool = False,
        progress: bool = False,
    ) -> Export:
        """Write the captured rows of a request to a file. The capture may be larger than memory.

        The client first writes the rows to temporary files next to `path`, and then the export. The file at `path`
        appears only once it is whole. docs/exports.md describes the formats.

        Args:
            request_id: The request.
            path: The file to write; for Zarr, the folder.
            format: "safetensors", "npz", "zarr" or "parquet". The last two need the extras of the same names. None
                derives the format from the path's suffix.
            layers: Only these layers; this and the next six arguments are as for `activations`.
            sites: Only these sites.
            sequences: Only these sequences.
            positions: Only these positions.
            wait: Wait until the capture has ended.
            timeout: The most seconds to wait and read, without the time for writing the export.
            allow_partial: Write the rows that a capture has although it is not complete. Each format says which are
                missing.
            overwrite: Replace an existing export.
            progress: Show progress bars, on a terminal or in Jupyter.

        Raises:
            FileExistsError: The path exists and may not be replaced.
            ImportError: The format's extra is not installed; the message names it.
            OSError: The export cannot be written.
            InvalidRequest: The format does not exist. The other errors are those of `activations`.

        Example:
            >>> client.export(reply.request_id, "joy.zarr").num_rows
            2070
        """
        job = ExportJob(path, format, overwrite=overwrite, progress=progress)
        plan = plan_read(
            request_id, layers=layers, sites=sites, sequences=sequences, positions=positions,
            follow=wait, allow_partial=allow_partial,
        )  # fmt: skip
        with job.begin() as (place, scratch):
            reading = Reading(plan, allocate=scratch.allocate)
            with progress_bar(f"reading {plan.request.capture_id}", None, enabled=progress, of_bytes=True) as advance:
                for data in self._read(reading, timeout):
                    reading.add(data)
                    count = reading.take_bytes()
                    advance(count)
                    scratch.touch(count)
            acts = reading.activations()
            warn_if_empty(acts)
            return io.write_export(job, acts, place, scratch.touch)

    def follow(
        self,
        request_id: RequestLike,
        *,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequence: int = 0,
        positions: PositionsLike = None,
        timeout: float | None = None,
        allow_partial: bool = False,
    ) -> Generator[Piece, None]:
        """Yield rows while the model generates, until the capture has ended. Each row comes once, in no fixed order.

        The arguments are those of `activations`, for one sequence. If the store is away, the client waits for it as
        `activations` does. The model may run a step too far, so rows may come for positions after the last one of the
        sequence. The manifest says where the sequence ends.

        Raises:
            IncompleteCapture: Rows are missing. It is raised after the last piece.
            AbortedCapture: The request was aborted. It is raised after the last piece.
            UnknownCapture: The capture does not exist, was deleted, or was replaced after the first piece.
            Unreachable: The store was away until the timeout.

        Warns:
            EmptyCaptureWarning: The capture has none of the selected positions.

        Example:
            >>> for site, layer, positions, rows in client.follow(stream.request_id, layers=[12]):
            ...     print(layer, positions, rows.shape)
            12 [0 1 2 3] (4, 576)
        """
        plan = plan_read(
            request_id, layers=layers, sites=sites, sequences=[sequence], positions=positions,
            follow=True, allow_partial=allow_partial,
        )  # fmt: skip
        return io.resumable(partial(self._followed, Reading(plan, keep_values=False)), timeout)

    def manifest(self, request_id: RequestLike, *, wait: bool | float = False, archived: bool = False) -> Manifest:
        """Return the manifest of a capture.

        If the store is away, the client retries for `wait` seconds plus its own timeout. With `wait=True`, it retries
        as `activations` does without a timeout.

        Args:
            request_id: The request.
            wait: Seconds to wait for the capture to end; True means no limit. If the capture is still open after that
                time, its manifest is returned as it is then.
            archived: Wait until the rows are in the store's archive, too, without a limit if `wait` gives none. Look
                at `Manifest.archive_state` then: it is "pending" if the time is over, and empty if the store has no
                archive.

        Raises:
            UnknownCapture: The capture does not exist.
            DamagedCapture: With `archived`: a chunk is damaged, so the capture is never copied.
            Unreachable: The store was away until the end of the retries.

        Example:
            >>> client.manifest(reply.request_id, wait=10).state
            'complete'
        """
        capture_id = check_capture_id(request_id)
        self._known_stores()
        deadline = Deadline.of_wait(True if archived and wait is False else wait)

        left = deadline.remaining()
        retries = ReadRetries(Deadline(None if left is None or self._timeout is None else left + self._timeout))

        def ask(endpoint: str) -> Manifest:
            while True:
                seconds = deadline.slice()
                request = get_request(capture_id, seconds, archived=archived)
                answer = self._call(
                    endpoint, self._store(endpoint).GetCapture, request, extra=seconds, capture_id=capture_id
                )
                retries.progress()
                manifest = Manifest.from_proto(answer.manifest)
                is_there = manifest.is_final and not (archived and manifest.archive_state == "pending")
                if is_there or deadline.is_over():
                    return manifest

        while True:
            try:
                return self._ask_holder(capture_id, ask)
            except exc.ResiduumError as failure:
                delay = retries.seconds_after(failure, self._patience(failure))
                if delay is None:
                    raise (retries.verdict(failure) or failure) from None
            io.sleep(delay)

    def captures(
        self, *, prefix: str = "", states: str | Iterable[str] = (), where: str = "", allow_partial: bool = False
    ) -> Generator[CaptureSummary, None]:
        """Yield the captures of all stores, newest first. Pages are fetched as they are needed.

        Args:
            prefix: Only captures whose ID starts with this.
            states: Only captures in these states: "open", "complete", "incomplete", "aborted".
            where: Only captures whose labels match this, such as "split = train and y >= 2"; docs/concepts/captures.md
                has the rules.
            allow_partial: Leave out stores that do not answer, with a warning, instead of raising.

        Raises:
            InvalidRequest: A state does not exist, or `where` cannot be parsed.
            Unreachable: A store does not answer; the message names it.

        Warns:
            SilentStoreWarning: With `allow_partial`: a store did not answer and was left out.

        Example:
            >>> [summary.capture_id for summary in client.captures(states="complete")]
            ['req-1f…', 'req-09…']
        """
        request = list_request(prefix, states, where)
        check_flag("allow_partial", allow_partial)
        begun: list[Listing] = []
        return io.resumable(lambda _: self._captures(request, allow_partial=allow_partial, begun=begun), None)

    def captures_page(
        self,
        *,
        page_size: int = 100,
        page_token: str = "",
        prefix: str = "",
        states: str | Iterable[str] = (),
        where: str = "",
    ) -> CapturePage:
        """Return one page of the list of captures. Its `next_page_token` requests the next page.

        Args:
            page_size: The most captures in the page, from 1 to 1000.
            page_token: The `next_page_token` of the previous page, with the same filter; empty for the first page.
            prefix: As for `captures`.
            states: As for `captures`.
            where: As for `captures`.

        Raises:
            InvalidRequest: A state does not exist, the size is out of range, or the token is invalid or belongs to
                other stores or another filter.
            Unreachable: A store does not answer; the message names it.

        Example:
            >>> page = client.captures_page(page_size=20)
            >>> page = client.captures_page(page_size=20, page_token=page.next_page_token)
        """
        request, place = list_request(prefix, states, where, page_size), read_token(page_token)
        stores = self._refreshed_stores()
        check_place(place, stores)
        listing = Listing(stores, request, place)
        captures: list[CaptureSummary] = []
        with closing(self._listed(listing, allow_partial=False)) as summaries:
            while len(captures) < page_size and (summary := next(summaries, None)):
                captures.append(summary)
            return CapturePage(tuple(captures), listing.token())

    def label(self, request_id: RequestLike, labels: Mapping[str, LabelValue | None]) -> dict[str, LabelValue]:
        """Change the labels of a capture in any state.

        Args:
            request_id: The request.
            labels: The labels to set: texts, numbers or bools by name. None removes a label. Others do not change.

        Returns:
            All labels that the capture now has.

        Raises:
            UnknownCapture: The capture does not exist.
            InvalidRequest: A label is invalid, or the capture would have too many.
            TypeError: A value is not a text, number, bool or None.

        Example:
            >>> client.label(reply, {"split": "test", "y": None})
            {'split': 'test'}
        """
        capture_id = check_capture_id(request_id)
        request = label_request(capture_id, labels)

        def ask(endpoint: str) -> dict[str, LabelValue]:
            answer = self._call(endpoint, self._store(endpoint).LabelCapture, request, capture_id=capture_id)
            return to_dict(answer.labels)

        return self._ask_holder(capture_id, ask)

    def delete(
        self,
        request_id: RequestLike | Iterable[RequestLike] | None = None,
        *,
        prefix: str = "",
        states: str | Iterable[str] = (),
        where: str = "",
    ) -> int:
        """Delete a capture in any state, a list of captures, or all captures that a filter selects.

        Of several captures, all are deleted that can be, before an error is raised.

        Args:
            request_id: The request or a list of requests, as for `activations`; None with a filter.
            prefix: Without `request_id`: all captures whose ID starts with this.
            states: Without `request_id`: only captures in these states; see `captures`.
            where: Without `request_id`: only captures whose labels match this; see `captures`.

        Returns:
            The number of bytes freed. A filter that selects no capture frees 0.

        Raises:
            InvalidRequest: A request and a filter are both given, or neither; or an admin's filter selects captures of
                several tenants.
            UnknownCapture: The capture does not exist. For a list, the message names the captures that do not exist.
            Unreachable: The capture's store, or one that may hold it, does not answer.

        Example:
            >>> client.delete(prefix="trial-", states=["incomplete", "aborted"])
            1992294
        """
        check_deletion(request_id, prefix, states, where)
        if request_id is None:
            found = self._selected(prefix, where, Deadline(self._timeout), states)
            names = [item.capture_id for item in found]
            return self._for(found)._delete_many(names, may_be_gone=True)  # noqa: SLF001 - as in `rows`
        if is_many(request_id):
            return self._delete_many(check_ids(request_id), may_be_gone=False)
        return self._delete(check_capture_id(request_id))

    def stats(self, *, allow_partial: bool = False) -> list[StoreStats]:
        """Return the statistics of each store; `StoreStats.total` adds them up.

        Args:
            allow_partial: Leave out stores that do not answer, with a warning, instead of raising.

        Raises:
            Unreachable: A store does not answer; the message names it.

        Warns:
            SilentStoreWarning: With `allow_partial`: a store did not answer and was left out.
        """
        check_flag("allow_partial", allow_partial)
        found = []
        for store in self._refreshed_stores():
            request = store_pb2.GetStatsRequest()
            try:
                answer = self._call(store.endpoint, self._store(store.endpoint).GetStats, request)
            except (exc.Unavailable, exc.DeadlineExceeded) as failure:
                self._leave_out(store, failure, allow_partial=allow_partial)
            else:
                found.append(StoreStats.from_proto(store, answer))
        return found

    def _captures(
        self,
        request: store_pb2.ListCapturesRequest,
        within: Deadline | None = None,
        *,
        allow_partial: bool,
        begun: list[Listing] | None = None,
    ) -> Generator[CaptureSummary, None]:
        """Yield captures, newest first. `begun` keeps the list; with the same one, another call goes on with it."""
        begun = [] if begun is None else begun
        if not begun:
            begun.append(Listing(self._refreshed_stores(within), request))
        yield from self._listed(begun[0], within, allow_partial=allow_partial)

    def _listed(
        self, listing: Listing, within: Deadline | None = None, *, allow_partial: bool
    ) -> Generator[CaptureSummary, None]:
        while not listing.is_over:
            for store, request in listing.due():
                ask = self._store(store.endpoint).ListCaptures
                try:
                    page = self._call(store.endpoint, ask, request, within=within)
                except (exc.Unavailable, exc.DeadlineExceeded) as failure:
                    self._leave_out(store, failure, allow_partial=allow_partial)
                    listing.leave_out(store)
                else:
                    listing.add(store, page)
            for name, summary in listing.ready():
                yield CaptureSummary.from_proto(summary, name)

    def _leave_out(self, store: StoreAddress, failure: exc.ResiduumError, *, allow_partial: bool) -> None:
        error = silent_store({store: failure}, "What it holds is unknown.")
        if not allow_partial:
            raise error from None
        warn_caller(str(error), exc.SilentStoreWarning)

    def _follow(self, reading: Reading, timeout: float | None = None) -> Generator[Piece, None]:
        for data in self._read(reading, timeout):
            yield from reading.add(data)
        reading.manifest()

    def _followed(self, reading: Reading, timeout: float | None) -> Generator[Piece, None]:
        with closing(self._follow(reading, timeout)) as pieces:
            yield from pieces
        manifest = reading.manifest()
        if reading.is_empty and manifest.state == "complete":
            warn_of_no_rows([manifest.capture_id], "there is nothing to follow")

    def _activations_of(
        self, capture_ids: Iterable[str], plan: ReadPlan | None, timeout: float | None, *, progress: bool
    ) -> list[Activations]:
        """Return the activations of captures in any order, without repeats. Without captures, `plan` is None."""
        names = check_ids(capture_ids)
        if plan is None:
            return []
        deadline, count = Deadline(timeout), most_streams(names)
        if count > MESSAGE_STREAMS and not self._has_memory(names, deadline):
            count = MESSAGE_STREAMS
        parts = split_reads(names, count)
        try:
            return self._read_parts(parts, plan, deadline.remaining(), progress=progress)
        except exc.UnknownCapture:
            if len(parts) == 1:
                raise
        # The error of one stream names all of them.
        return self._read_parts([names], plan, deadline.remaining(), progress=progress)

    def _read_parts(
        self, parts: Sequence[Sequence[str]], plan: ReadPlan, timeout: float | None, *, progress: bool
    ) -> list[Activations]:
        """Read captures in several streams at the same time, one for each part."""
        found: list[Activations] = []
        total = sum(map(len, parts))
        with progress_bar(f"reading {total} captures", total, enabled=progress) as advance:

            def read(lane: int, stop: io.Stop) -> None:
                for acts in self._read_many(plan, parts[lane], timeout, lane=lane, stop=stop):
                    if stop.is_requested:
                        return
                    found.append(acts)
                    advance(1)

            io.run_all([read] * len(parts))
        return found

    def _chosen(
        self, captures: Iterable[RequestLike] | None, prefix: str | None, where: str, deadline: Deadline
    ) -> tuple[Self, list[str]]:
        """Return the IDs of the captures that the caller named, or those that the filter selects, and their client."""
        if captures is not None:
            check_choice(captures, prefix, where)
            return self, check_ids(captures)
        prefix = check_filter(prefix, where)
        found = self._selected(prefix, where, deadline)
        return self._for(found), check_some([item.capture_id for item in found], prefix, where)

    def _for(self, found: Iterable[CaptureSummary]) -> Self:
        """Return this client for the tenant of captures that a filter has found. See `tenant_of` for the error."""
        client = copy.copy(self)
        client._tenant = tenant_of(found, self._tenant)  # noqa: SLF001 - as in `rows`
        return client

    def _selected(
        self, prefix: str, where: str, deadline: Deadline, states: str | Iterable[str] = ()
    ) -> list[CaptureSummary]:
        """Return the captures that a filter selects, by ID. If a store is away, list again, as reads do.

        An admin's filter may select captures of other tenants: read and delete them with the client of `_for`.
        """
        request, retries = list_request(prefix, states, where), ReadRetries(deadline)
        while True:
            try:
                listed = self._captures(request, deadline, allow_partial=False)
                found = {(item.capture_id, item.tenant): item for item in listed}
            except exc.ResiduumError as failure:
                delay = retries.seconds_after(failure, self._patience(failure))
                if delay is None:
                    raise (retries.verdict(failure) or failure) from None
            else:
                return [found[key] for key in sorted(found)]
            io.sleep(delay)
