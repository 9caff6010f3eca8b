"""The store's side of the asyncio client; see `residuum.captures.client`, which has the same methods without await."""

from __future__ import annotations

import asyncio
import itertools
import os
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio

from residuum import exceptions as exc
from residuum.exports.job import Export, ExportJob
from residuum.protocol.deadlines import Deadline, get_request, list_request
from residuum.protocol.endpoints import check_endpoint
from residuum.protocol.listing import Listing, check_place, read_token
from residuum.protocol.reading import Piece, Reading, plan_read
from residuum.protocol.requests import RequestLike, check_id
from residuum.protocol.stores import Search, StoreDirectory, silent_store
from residuum.protocol.tenants import check_tenant, for_tenant
from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import TLS
from residuum.transport.connection_settings import Token, check_channel, opener, resolve_credentials
from residuum.transport.connections import READ_CHUNKS, Backoff, Channels
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
    """What both services' addresses are needed for. Use it as part of `residuum.AsyncClient`."""

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
        """Return the captured rows of a request, when all of them are there; see `Client.activations`.

        Example:
            >>> acts = await client.activations(reply.request_id, layers=[12])
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
        """Write the captured rows of a request to a file; see `Client.export`. Files are written by a thread.

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
            acts = reading.activations()
            writing = asyncio.ensure_future(asyncio.to_thread(job.write, acts, place, scratch.touch))
            try:
                return await asyncio.shield(writing)
            except asyncio.CancelledError:
                job.stop()
                await asyncio.wait([writing])  # before the place that it writes in is removed
                raise

    async def follow(
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
        """Yield rows while the model generates; see `Client.follow`.

        Example:
            >>> async for site, layer, positions, rows in client.follow(stream.request_id, layers=[12]):
            ...     print(layer, positions, rows.shape)
        """
        plan = plan_read(
            request_id, layers=layers, sites=sites, sequences=sequence, positions=positions,
            follow=True, allow_partial=allow_partial,
        )  # fmt: skip
        reading = Reading(plan, keep_values=False)
        async for data in self._read(reading, timeout):
            for piece in reading.add(data):
                yield piece
        reading.manifest()

    async def manifest(self, request_id: RequestLike, *, wait: bool | float = False) -> Manifest:
        """Return what is known of a capture; see `Client.manifest`."""
        capture_id = check_id(request_id)
        deadline = Deadline.of_wait(wait)

        async def ask(endpoint: str) -> Manifest:
            while True:
                seconds = deadline.slice()
                request = get_request(capture_id, seconds)
                answer = await self._call(
                    endpoint, self._store(endpoint).GetCapture, request, extra=seconds, capture_id=capture_id
                )
                manifest = Manifest.from_proto(answer.manifest)
                if manifest.is_final or deadline.is_over():
                    return manifest

        return await self._ask_holder(capture_id, ask)

    async def captures(
        self, *, prefix: str = "", states: str | Iterable[str] = (), allow_partial: bool = False
    ) -> AsyncIterator[CaptureSummary]:
        """Yield the captures of all stores as one list, newest first; see `Client.captures`."""
        request = list_request(prefix, states)
        async for summary in self._listed(
            Listing(await self._refreshed_stores(), request), allow_partial=allow_partial
        ):
            yield summary

    async def captures_page(
        self, *, page_size: int = 100, page_token: str = "", prefix: str = "", states: str | Iterable[str] = ()
    ) -> CapturePage:
        """Return a part of the list of captures; see `Client.captures_page`."""
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
        """Delete a capture, and return the bytes that were freed; see `Client.delete`."""
        capture_id = check_id(request_id)
        request = store_pb2.DeleteCaptureRequest(capture_id=capture_id)

        async def ask(endpoint: str) -> int:
            answer = await self._call(endpoint, self._store(endpoint).DeleteCapture, request, capture_id=capture_id)
            return answer.freed_bytes

        return await self._ask_holder(capture_id, ask)

    async def stats(self, *, allow_partial: bool = False) -> list[StoreStats]:
        """Return what each store holds and has done; see `Client.stats`."""
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
        """Return what the server serves, and within which limits; see `Client.info`."""
        request = inference_pb2.GetModelInfoRequest(check_store=check_store)
        return ModelInfo.from_proto(await self._call(self.endpoint, self._inference.GetModelInfo, request))

    async def store_endpoints(self) -> tuple[str, ...]:
        """Return where the stores are: as given to the client, or else as the inference service says."""
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
            return await method(request, timeout=None if self._timeout is None else self._timeout + extra)
        except grpc.RpcError as error:
            raise from_rpc_error(error, endpoint, **facts) from None

    async def _read(self, reading: Reading, timeout: float | None) -> AsyncIterator[bytes]:
        """Yield the messages of a read; begin again if the connection breaks. Rows that come twice do no harm."""
        capture_id = reading.request.capture_id
        endpoint, moved = await self._find(capture_id), False
        deadline, backoff = Deadline(timeout), Backoff()
        while True:
            reading.begin()
            call = self._reader(endpoint)(for_tenant(reading.request, self._tenant), timeout=deadline.remaining())
            try:
                async for data in call:
                    backoff.progress()
                    yield data
            except grpc.RpcError as error:
                failure = from_rpc_error(error, endpoint, capture_id=capture_id)
                delay = backoff.seconds_after(failure)
                if delay is None:
                    moved = not moved and reading.is_at_start and isinstance(failure, exc.UnknownCapture)
                    if not moved or not await self._may_be_elsewhere(capture_id):
                        raise reading.explain(failure) from None
                    endpoint, delay = await self._find(capture_id), 0.0
            else:
                return
            finally:
                call.cancel()
            await asyncio.sleep(delay)

    def _reader(self, endpoint: str) -> grpc.aio.UnaryStreamMultiCallable[store_pb2.ReadChunksRequest, bytes]:
        # No deserializer: rows are copied from the message's own bytes to where they belong.
        return self._channels.get(endpoint, "reads").unary_stream(
            READ_CHUNKS,
            request_serializer=store_pb2.ReadChunksRequest.SerializeToString,
            response_deserializer=None,
        )
