"""The store's side of the asyncio client: activations, manifests and lists of captures."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio

from residuum import exceptions as exc
from residuum._async import io
from residuum.exports.job import Export, ExportJob
from residuum.protocol.deadlines import Deadline, get_request, list_request
from residuum.protocol.endpoints import check_endpoint
from residuum.protocol.listing import Listing, check_place, read_token
from residuum.protocol.reading import Piece, Reading, plan_read
from residuum.protocol.requests import RequestLike, check_capture_id
from residuum.protocol.stores import Search, StoreDirectory, silent_store
from residuum.protocol.tenants import check_tenant, for_tenant
from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import TLS
from residuum.transport.connection_settings import Token, check_channel, opener, resolve_credentials
from residuum.transport.connections import LONGEST_OUTAGE_SECONDS, READ_CHUNKS, Channels, ReadRetries
from residuum.transport.failures import from_rpc_error
from residuum.transport.progress import progress_bar
from residuum.v1 import inference_pb2, inference_pb2_grpc, store_pb2, store_pb2_grpc
from residuum.values.activations import Activations
from residuum.values.manifest import Manifest
from residuum.values.replies import CapturePage, CaptureSummary, ModelInfo, StoreStats
from residuum.values.selections import LayersLike, PositionsLike
from residuum.wire.placement import StoreAddress

_Answer = TypeVar("_Answer")


class AsyncCaptureClient:
    """The methods that read, list and delete captures; the base of `residuum.AsyncClient`."""

    def __init__(
        self,
        endpoint: str,
        *,
        store: str | Iterable[str] | None = None,
        timeout: float | None = 30.0,
        token: Token = None,
        tls: TLS | bool | None = None,
        insecure: bool | None = None,
        tenant: str | None = None,
    ) -> None:
        self._tenant = check_tenant(tenant)
        self.endpoint = check_endpoint(endpoint)
        self._timeout = timeout
        self._stores = StoreDirectory(store)
        self.credentials = resolve_credentials(token=token, tls=tls, insecure=insecure)
        """What it connects with, to the inference service and to the stores."""
        check_channel(self.credentials, self.endpoint)
        self._channels: Channels[grpc.aio.Channel] = Channels(opener(open_aio_channel, self.credentials))

    async def activations(
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
    ) -> Activations:
        """Return the captured rows of a request, when all of them are there.

        If the store is away, the client tries again until the timeout, and then continues where it was. Without a
        timeout it waits for 5 minutes; or, for a store that this client has never reached, for the client's own
        timeout (30 seconds). Rows are checked against their checksums.

        Args:
            request_id: The request: its reply, `reply.request_id`, or anything else that has its id.
            layers: Only these layers; None means all that were captured.
            sites: Only these sites, as a list or separated by commas; None means all.
            sequences: Only these sequences; None means all.
            positions: Only these positions; None means all. See `Positions.of`.
            wait: Wait until the capture has ended. Otherwise one that is still open raises OpenCapture.
            timeout: Seconds to wait and read at most; None means as long as it takes.
            allow_partial: Return what is there of a capture that is open, incomplete or aborted, with NaN for the rows
                that are missing; `present` tells which.
            progress: Show a progress bar, on a terminal or in Jupyter.

        Raises:
            IncompleteCapture: Rows are missing for good; the manifest in the exception says which and why.
            AbortedCapture: The request was stopped.
            OpenCapture: `wait` is false and the capture is still being written.
            UnknownCapture: There is no such capture: the request captured nothing, or it was deleted, or has expired.
            InvalidRequest: A layer or site was not captured.
            DeadlineExceeded: The time is over.
            Unreachable: The store was away until the time was over, or a certificate is refused.

        Warns:
            EmptyCaptureWarning: No position is among those asked for, as with position 5000 of a shorter request: the
                capture is complete with 0 rows, and their mean is NaN.

        Example:
            >>> acts = await client.activations(reply.request_id, layers=[12])
            >>> acts[12].mean(axis=0).shape
            (576,)
        """
        plan = plan_read(
            request_id, layers=layers, sites=sites, sequences=sequences, positions=positions,
            follow=wait, allow_partial=allow_partial,
        )  # fmt: skip
        reading = Reading(plan)
        with progress_bar(f"reading {plan.request.capture_id}", None, enabled=progress, of_bytes=True) as advance:
            async for data in self._read(reading, timeout):
                reading.add(data)
                advance(len(data))
        return reading.activations()

    async def export(
        self,
        request_id: RequestLike,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002 - what it is
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
        """Write the captured rows of a request to a file, however large, without having them in memory.

        Rows come from the store into files beside the target, and from there into the format; nothing stands at `path`
        before all of it does. docs/exports.md says what the formats hold.

        Args:
            request_id: The request.
            path: Where to write; its suffix names the format if nothing else does.
            format: "safetensors", "npz", "zarr" or "parquet". The last two need the extras of these names.
            layers: What of it, and `allow_partial`, `wait`, `timeout`: as for `activations`.
            sites: Only these sites.
            sequences: Only these sequences.
            positions: Only these positions.
            wait: Wait until the capture has ended.
            timeout: Seconds to wait and read at most; writing comes on top.
            allow_partial: Write what is there of a capture that is not complete; each format says what is missing.
            overwrite: Replace what is there.
            progress: Show progress bars, on a terminal or in Jupyter.

        Raises:
            FileExistsError: Something is there, and may not be replaced.
            ImportError: The format's extra is not installed; the message names it.
            OSError: It cannot be written.
            InvalidRequest: There is no such format. The other errors are those of `activations`.

        Example:
            >>> (await client.export(reply.request_id, "joy.zarr")).num_rows
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
                async for data in self._read(reading, timeout):
                    reading.add(data)
                    advance(len(data))
                    scratch.touch(len(data))
            return await io.write_export(job, reading.activations(), place, scratch.touch)

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
    ) -> AsyncIterator[Piece]:
        """Yield rows while the model generates, each once, in no particular order, until the capture has ended.

        The arguments are those of `activations`, for one sequence. If the store is away, the client waits for it as
        `activations` does. No row is lost or comes twice. Rows may come for a position after the last one
        that counts (the model may run a step too far); the manifest tells.

        Raises:
            IncompleteCapture: Rows are missing. It is raised after the last piece.
            AbortedCapture: The request was stopped. It is raised after the last piece.
            Unreachable: The store was away until the time was over.

        Example:
            >>> async for site, layer, positions, rows in client.follow(stream.request_id, layers=[12]):
            ...     print(layer, positions, rows.shape)
            12 [0 1 2 3] (4, 576)
        """
        plan = plan_read(
            request_id, layers=layers, sites=sites, sequences=sequence, positions=positions,
            follow=True, allow_partial=allow_partial,
        )  # fmt: skip
        return self._follow(Reading(plan, keep_values=False), timeout)

    async def manifest(self, request_id: RequestLike, *, wait: bool | float = False) -> Manifest:
        """Return what is known of a capture.

        If its store is away, the client tries again until `wait` and the client's timeout are over. With `wait=True` it
        waits as `activations` does.

        Args:
            request_id: The request.
            wait: How many seconds to wait for the capture to end; True means as long as it takes. When the
                time is over, the manifest of the open capture is returned.

        Raises:
            UnknownCapture: There is no such capture.
            Unreachable: The store was away until the time was over.

        Example:
            >>> (await client.manifest(reply.request_id, wait=10)).state
            'complete'
        """
        capture_id = check_capture_id(request_id)
        await self._known_stores()
        deadline = Deadline.of_wait(wait)

        left = deadline.remaining()
        retries = ReadRetries(Deadline(None if left is None or self._timeout is None else left + self._timeout))

        async def ask(endpoint: str) -> Manifest:
            while True:
                seconds = deadline.slice()
                request = get_request(capture_id, seconds)
                answer = await self._call(
                    endpoint, self._store(endpoint).GetCapture, request, extra=seconds, capture_id=capture_id
                )
                retries.progress()
                manifest = Manifest.from_proto(answer.manifest)
                if manifest.is_final or deadline.is_over():
                    return manifest

        while True:
            try:
                return await self._ask_holder(capture_id, ask)
            except exc.ResiduumError as failure:
                delay = retries.seconds_after(failure, self._patience(failure))
                if delay is None:
                    raise (retries.verdict(failure) or failure) from None
            await io.sleep(delay)

    def captures(
        self, *, prefix: str = "", states: str | Iterable[str] = (), allow_partial: bool = False
    ) -> AsyncIterator[CaptureSummary]:
        """Yield the captures of all stores as one list, newest first; it is fetched as it is read.

        Args:
            prefix: Only those whose id starts with this.
            states: Only those in these states: "open", "complete", "incomplete", "aborted".
            allow_partial: Leave out stores that cannot be asked, with a warning, instead of raising.

        Raises:
            InvalidRequest: There is no such state.
            Unreachable: A store cannot be asked; the message names it.

        Warns:
            SilentStoreWarning: With `allow_partial`: a store was left out.

        Example:
            >>> [summary.capture_id async for summary in client.captures(states="complete")]
            ['req-1f…', 'req-09…']
        """
        request = list_request(prefix, states)
        return self._captures(request, allow_partial=allow_partial)

    async def captures_page(
        self, *, page_size: int = 100, page_token: str = "", prefix: str = "", states: str | Iterable[str] = ()
    ) -> CapturePage:
        """Return one page of the list of captures; its `next_page_token` leads to the next page.

        Args:
            page_size: How many captures at most, from 1 to 1000.
            page_token: The `next_page_token` of the part before, with the same filter; empty for the first.
            prefix: As for `captures`.
            states: As for `captures`.

        Raises:
            InvalidRequest: There is no such state, the size is out of range, or the token is not one of these stores,
                or goes with another filter.
            Unreachable: A store cannot be asked; the message names it.

        Example:
            >>> page = await client.captures_page(page_size=20)
            >>> page = await client.captures_page(page_size=20, page_token=page.next_page_token)
        """
        request, place = list_request(prefix, states, page_size), read_token(page_token)
        stores = await self._refreshed_stores()
        check_place(place, stores)
        listing = Listing(stores, request, place)
        captures: list[CaptureSummary] = []
        async with aclosing(self._listed(listing, allow_partial=False)) as summaries:
            while len(captures) < page_size and (summary := await anext(summaries, None)):
                captures.append(summary)
            return CapturePage(tuple(captures), listing.token())

    async def delete(self, request_id: RequestLike) -> int:
        """Delete a capture, whatever its state.

        Returns:
            The bytes that were freed.

        Raises:
            UnknownCapture: There is no such capture.
            Unreachable: Its store, or one that may hold it, cannot be asked.
        """
        capture_id = check_capture_id(request_id)
        request = store_pb2.DeleteCaptureRequest(capture_id=capture_id)

        async def ask(endpoint: str) -> int:
            answer = await self._call(endpoint, self._store(endpoint).DeleteCapture, request, capture_id=capture_id)
            return answer.freed_bytes

        return await self._ask_holder(capture_id, ask)

    async def stats(self, *, allow_partial: bool = False) -> list[StoreStats]:
        """Return what each store holds and has done; `StoreStats.total` adds them up.

        Args:
            allow_partial: Leave out stores that cannot be asked, with a warning, instead of raising.

        Raises:
            Unreachable: A store cannot be asked; the message names it.

        Warns:
            SilentStoreWarning: With `allow_partial`: a store was left out.
        """
        found = []
        for store in await self._refreshed_stores():
            request = store_pb2.GetStatsRequest()
            try:
                answer = await self._call(store.endpoint, self._store(store.endpoint).GetStats, request)
            except (exc.Unavailable, exc.DeadlineExceeded) as failure:
                self._leave_out(store, failure, allow_partial=allow_partial)
            else:
                found.append(StoreStats.from_proto(store, answer))
        return found

    async def info(self, *, check_store: bool = False) -> ModelInfo:
        """Return what the server serves, and within which limits.

        Args:
            check_store: Have it ask its stores whether they answer; see `ModelInfo.store_reachable`.

        Raises:
            NotServing: The model is still loading.
            Unreachable: Nothing answers at the endpoint.

        Example:
            >>> (await client.info()).num_layers
            30
        """
        request = inference_pb2.GetModelInfoRequest(check_store=check_store)
        return ModelInfo.from_proto(await self._call(self.endpoint, self._inference.GetModelInfo, request))

    async def store_endpoints(self) -> tuple[str, ...]:
        """Return where the stores are: as given to the client, or else as the inference service says.

        Raises:
            NoStore: It names none.
        """
        return tuple(store.endpoint for store in await self._refreshed_stores())

    @property
    def _inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self._channels.get(self.endpoint))

    def _store(self, endpoint: str) -> store_pb2_grpc.StoreServiceAsyncStub:
        return store_pb2_grpc.StoreServiceStub(self._channels.get(endpoint))

    async def _known_stores(self) -> tuple[StoreAddress, ...]:
        return self._stores.stores or await self._refreshed_stores()

    async def _refreshed_stores(self) -> tuple[StoreAddress, ...]:
        """Return the stores, with those that were added since they were last asked for."""
        known = self._stores.stores
        if self._stores.is_named:
            return known
        try:
            told = (await self.info()).stores
        except exc.ResiduumError:
            if known:
                return known  # without an inference service, stores can still be read
            raise
        return self._stores.learn(itertools.starmap(StoreAddress, told.items()), self.endpoint)

    async def _ask_holder(self, capture_id: str, ask: Callable[[str], Awaitable[_Answer]]) -> _Answer:
        """Ask the store that holds a capture; `ask` is given its endpoint."""
        endpoint = await self._find(capture_id)
        try:
            return await ask(endpoint)
        except exc.UnknownCapture:
            if not await self._may_be_elsewhere(capture_id):
                raise
        return await ask(await self._find(capture_id))

    async def _may_be_elsewhere(self, capture_id: str) -> bool:
        """Tell whether to look for a capture that is not where it was thought to be: there are other stores."""
        self._stores.forget(capture_id)
        return len(await self._refreshed_stores()) > 1

    async def _find(self, capture_id: str) -> str:
        """Return the endpoint of the store that holds a capture; the only store is not asked."""
        await self._known_stores()
        store = self._stores.known(capture_id)
        return (store or await self._search(capture_id)).endpoint

    async def _search(self, capture_id: str) -> StoreAddress:
        """Ask store by store for a capture, and in the end those that were added meanwhile."""
        search, request = Search(capture_id), get_request(capture_id, 0.0)
        for stores in (self._known_stores, self._refreshed_stores):
            for store in search.order(await stores()):
                try:
                    await self._call(
                        store.endpoint, self._store(store.endpoint).GetCapture, request, capture_id=capture_id
                    )
                except exc.ResiduumError as failure:
                    search.missed(store, failure)
                else:
                    self._stores.found(capture_id, store)
                    return store
        raise search.failure()

    async def _captures(
        self, request: store_pb2.ListCapturesRequest, *, allow_partial: bool
    ) -> AsyncIterator[CaptureSummary]:
        listing = Listing(await self._refreshed_stores(), request)
        async for summary in self._listed(listing, allow_partial=allow_partial):
            yield summary

    async def _listed(self, listing: Listing, *, allow_partial: bool) -> AsyncGenerator[CaptureSummary, None]:
        while not listing.is_over:
            for store, request in listing.due():
                try:
                    page = await self._call(store.endpoint, self._store(store.endpoint).ListCaptures, request)
                except (exc.Unavailable, exc.DeadlineExceeded) as failure:
                    self._leave_out(store, failure, allow_partial=allow_partial)
                    listing.leave_out(store)
                else:
                    listing.add(store, page)
            for name, summary in listing.ready():
                yield CaptureSummary.from_proto(summary, name)

    def _leave_out(self, store: StoreAddress, failure: exc.ResiduumError, *, allow_partial: bool) -> None:
        error = silent_store({store: failure}, "What it holds is not known.")
        if not allow_partial:
            raise error from None
        warnings.warn(str(error), exc.SilentStoreWarning, stacklevel=4)

    async def _call(
        self,
        endpoint: str,
        method: Callable[..., Awaitable[_Answer]],
        request: Any,
        *,
        extra: float = 0.0,
        **facts: str,
    ) -> _Answer:
        """Make a unary call with the client's deadline and `extra` seconds on top of it."""
        for_tenant(request, self._tenant)
        try:
            answer = await method(request, timeout=None if self._timeout is None else self._timeout + extra)
        except grpc.RpcError as error:
            has_answered = self._channels.has_answered(endpoint)
            raise from_rpc_error(error, endpoint, has_answered=has_answered, **facts) from None
        self._channels.note_answer(endpoint)
        return answer

    async def _follow(self, reading: Reading, timeout: float | None = None) -> AsyncIterator[Piece]:
        async for data in self._read(reading, timeout):
            for piece in reading.add(data):
                yield piece
        reading.manifest()

    async def _read(self, reading: Reading, timeout: float | None) -> AsyncIterator[bytes]:
        """Yield the messages of a read; begin again if the connection breaks. Rows that come twice do no harm."""
        capture_id, moved = reading.request.capture_id, False
        await self._known_stores()
        deadline = Deadline(timeout)
        retries = ReadRetries(deadline)
        call, endpoint = None, ""
        while True:
            try:
                endpoint = await self._find(capture_id)
                reading.begin()
                call = self._reader(endpoint)(for_tenant(reading.request, self._tenant), timeout=deadline.remaining())
                async for data in call:
                    retries.progress()
                    self._channels.note_answer(endpoint)
                    yield data
            except (grpc.RpcError, exc.ResiduumError) as error:
                failure = self._as_own(error, endpoint, capture_id)
                delay = retries.seconds_after(failure, self._patience(failure))
                if delay is None:
                    moved = not moved and reading.is_at_start and isinstance(failure, exc.UnknownCapture)
                    if not moved or not await self._may_be_elsewhere(capture_id):
                        raise (retries.verdict(failure) or reading.explain(failure)) from None
                    delay = 0.0
            else:
                return
            finally:
                if call is not None:
                    call.cancel()
            await io.sleep(delay)

    def _as_own(self, error: grpc.RpcError | exc.ResiduumError, endpoint: str, capture_id: str) -> exc.ResiduumError:
        """Return this package's exception for what ended a read."""
        if isinstance(error, exc.ResiduumError):
            return error
        has_answered = self._channels.has_answered(endpoint)
        return from_rpc_error(error, endpoint, has_answered=has_answered, capture_id=capture_id)

    def _patience(self, failure: exc.ResiduumError) -> float:
        """Return for how many seconds a read without a timeout waits for the store that is away."""
        endpoint = failure.endpoint if isinstance(failure, exc.Unreachable) else ""
        if self._timeout is None or not endpoint or self._channels.has_answered(endpoint):
            return LONGEST_OUTAGE_SECONDS
        return self._timeout

    def _reader(self, endpoint: str) -> grpc.aio.UnaryStreamMultiCallable[store_pb2.ReadChunksRequest, bytes]:
        # No deserializer: rows are copied from the message's own bytes to where they belong.
        return self._channels.get(endpoint, "reads").unary_stream(
            READ_CHUNKS,
            request_serializer=store_pb2.ReadChunksRequest.SerializeToString,
            response_deserializer=None,
        )
