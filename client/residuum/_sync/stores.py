# Generated from client/residuum/_async/stores.py by scripts/generate_sync.py. Edit that file, then run `make sync`.
"""How the synchronous client finds captures and calls the stores."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from residuum import exceptions as exc
from residuum._sync import io
from residuum.protocol.arguments import check_flag
from residuum.protocol.captures.many import ManyReading, not_found
from residuum.protocol.captures.reading import Reading, ReadPlan
from residuum.protocol.captures.stores import READ_STORE_ALONE, Search, StoreDirectory, check_stores
from residuum.protocol.captures.tenants import check_tenant, for_tenant
from residuum.protocol.deadlines import Deadline, call_seconds, get_request
from residuum.protocol.endpoints import check_endpoint
from residuum.rpc.credentials import TLS
from residuum.transport.connection_settings import Token, check_channel, opener, resolve_credentials
from residuum.transport.connections import (
    DESCRIBE_SECONDS,
    LONGEST_OUTAGE_SECONDS,
    READ_CAPTURES,
    READ_CHUNKS,
    Channels,
    ReadRetries,
)
from residuum.transport.failures import from_rpc_error, is_unknown_call
from residuum.transport.shared_memory import ReadMemory, SharedMemories
from residuum.v1 import inference_pb2, inference_pb2_grpc, store_pb2, store_pb2_grpc
from residuum.values.captures.activations import Activations
from residuum.values.model.info import ModelInfo
from residuum.wire.placement import StoreAddress

_Answer = TypeVar("_Answer")


class StoreClient:
    """The connections, the search for a capture's store, and the reads; the base class of `DeletionClient`."""

    def __init__(
        self,
        endpoint: str = "",
        *,
        store: str | Iterable[str] | None = None,
        timeout: float | None = 30.0,
        token: Token = None,
        tls: TLS | bool | None = None,
        insecure: bool | None = None,
        tenant: str | None = None,
        shared_memory: bool = True,
    ) -> None:
        store = check_stores(store)
        # A function, so that no repr of the client shows the token.
        self.settings: Callable[[], dict[str, Any]] = lambda: {
            "store": store, "timeout": timeout, "token": token, "tls": tls, "insecure": insecure, "tenant": tenant,
            "shared_memory": shared_memory,
        }  # fmt: skip
        """Returns the arguments of this client other than the endpoint, to make another one like it."""
        self._tenant = check_tenant(tenant)
        self._stores = StoreDirectory(store)
        self.endpoint = check_endpoint(endpoint) if endpoint or not self._stores.is_named else ""
        """The inference service; "" if the client was created with `store` alone."""
        self._timeout = call_seconds(timeout)
        self.credentials = resolve_credentials(token=token, tls=tls, insecure=insecure)
        """The credentials for the inference service and the stores."""
        if self.endpoint:
            check_channel(self.credentials, self.endpoint)
        self._channels: Channels[grpc.Channel] = Channels(opener(io.open_channel, self.credentials))
        self._memories = SharedMemories(wanted=check_flag("shared_memory", shared_memory))

    def info(self, *, check_store: bool = False) -> ModelInfo:
        """Return the served model and the server's limits.

        Args:
            check_store: Make the inference service check that its stores answer; see `ModelInfo.store_reachable`.

        Raises:
            NotServing: The model is still loading.
            Unreachable: Nothing answers at the endpoint.

        Example:
            >>> client.info().num_layers
            30
        """
        return self._info(check_store=check_store)

    def _info(self, *, check_store: bool = False, within: Deadline | None = None) -> ModelInfo:
        request = inference_pb2.GetModelInfoRequest(check_store=check_flag("check_store", check_store))
        answer = self._call(self.endpoint, self._inference.GetModelInfo, request, within=within)
        return ModelInfo.from_proto(answer)

    def store_endpoints(self) -> tuple[str, ...]:
        """Return the addresses of the stores: those given to the client, otherwise those from the inference service.

        Raises:
            NoStore: The inference service has no store.
        """
        return tuple(store.endpoint for store in self._refreshed_stores())

    def shared_memory_problems(self) -> dict[str, str]:
        """Return why shared memory is not used with each store. An empty text means that it is used.

        With a store on the same machine, rows pass through shared memory, which is faster than a connection. The client
        tries it by itself. This method tries it again now.

        Returns:
            The stores, by their endpoints.

        Raises:
            NoStore: No store is known. The other errors are those of `store_endpoints`.

        Example:
            >>> client.shared_memory_problems()
            {'localhost:50052': ''}
        """
        problems = {}
        for endpoint in self.store_endpoints():
            self._memories.retry(endpoint)
            memory = self._borrow_memory(endpoint, Deadline(self._timeout))
            problems[endpoint] = "" if memory is not None else self._memories.why_not(endpoint)
            if memory is not None:
                self._memories.give_back(memory, clean=True)
        return problems

    def _has_memory(self, capture_ids: Sequence[str], deadline: Deadline) -> bool:
        """Tell whether the store that likely has most of these captures shares memory with this client."""
        groups = self._stores.by_likely_store(capture_ids, self._known_stores(deadline))
        endpoint, _ = max(groups, key=lambda group: len(group[1]))
        memory = self._borrow_memory(endpoint, deadline)
        if memory is not None:
            self._memories.give_back(memory, clean=True)
        return memory is not None

    def _borrow_memory(self, endpoint: str, deadline: Deadline) -> ReadMemory | None:
        """Return shared memory for a read from a store; None if its rows are to come in messages."""
        memory = self._memories.borrow(endpoint)
        if memory is not None or not self._memories.may_open(endpoint):
            return memory
        description = self._memories.description(endpoint)
        if description is None:
            left = deadline.remaining()
            seconds = DESCRIBE_SECONDS if left is None else min(left, DESCRIBE_SECONDS)
            try:
                description = self._store(endpoint).DescribeStore(store_pb2.DescribeStoreRequest(), timeout=seconds)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, endpoint)
                # A store that is away may come back at any time; an older one does not know the call.
                self._memories.failed(endpoint, str(failure), is_passing=isinstance(failure, exc.Unavailable))
                return None
        return io.run_in_thread(self._memories.open, endpoint, description, unwanted=self._keep_memory)

    def _keep_memory(self, memory: ReadMemory | None) -> None:
        """Keep a memory that was opened for a read which has ended meanwhile."""
        if memory is not None:
            self._memories.give_back(memory, clean=True)

    @property
    def _inference(self) -> inference_pb2_grpc.InferenceServiceStub:
        if not self.endpoint:
            raise exc.InvalidRequest(
                "This client has no inference service: it was created with store= alone, to read captures. For this "
                "call, create a client with the endpoint of an inference service.",
                reason="INVALID_FIELD",
            )
        return self._channels.stub(inference_pb2_grpc.InferenceServiceStub, self.endpoint)

    def _store(self, endpoint: str) -> store_pb2_grpc.StoreServiceStub:
        return self._channels.stub(store_pb2_grpc.StoreServiceStub, endpoint)

    def _known_stores(self, within: Deadline | None = None) -> tuple[StoreAddress, ...]:
        return self._stores.stores or self._refreshed_stores(within, needs_all=False)

    def _refreshed_stores(self, within: Deadline | None = None, *, needs_all: bool = True) -> tuple[StoreAddress, ...]:
        """Return the stores, including those that the inference service has added since the last call.

        Args:
            within: The deadline of the whole operation, if it has one.
            needs_all: Warn if the inference service does not answer and there may be stores that are not known.
        """
        if self._stores.is_named:
            return self._stores.stores
        try:
            advertised = self._info(within=within).stores
        except exc.ResiduumError as failure:
            known = self._stores.last_known(warns=needs_all)
            if known:
                return known  # without an inference service, stores can still be read
            if isinstance(failure, (exc.Unavailable, exc.DeadlineExceeded)):
                failure.args = (f"{failure} {READ_STORE_ALONE}",)
            raise
        return self._stores.learn(itertools.starmap(StoreAddress, advertised.items()), self.endpoint)

    def _ask_holder(self, capture_id: str, ask: Callable[[str], _Answer]) -> _Answer:
        """Return the answer of the store that holds a capture. `ask` takes the store's endpoint."""
        endpoint = self._find(capture_id)
        try:
            return ask(endpoint)
        except exc.UnknownCapture:
            if not self._may_be_elsewhere([capture_id]):
                raise
        return ask(self._find(capture_id))

    def _may_be_elsewhere(self, capture_ids: Iterable[str], within: Deadline | None = None) -> bool:
        """Forget the store of captures that were not there, and tell whether there are other stores to search."""
        for capture_id in capture_ids:
            self._stores.forget(capture_id)
        return len(self._refreshed_stores(within)) > 1

    def _find(self, capture_id: str, within: Deadline | None = None) -> str:
        """Return the endpoint of the store that holds a capture. If there is only one store, it is not asked."""
        self._known_stores(within)
        store = self._stores.known(capture_id)
        return (store or self._search(capture_id, within)).endpoint

    def _search(self, capture_id: str, within: Deadline | None) -> StoreAddress:
        """Ask the known stores for a capture one by one, and then the stores that were added since."""
        search, request = Search(capture_id), get_request(capture_id, 0.0)
        for stores in (self._known_stores, self._refreshed_stores):
            for store in search.order(stores(within)):
                ask = self._store(store.endpoint).GetCapture
                try:
                    self._call(store.endpoint, ask, request, within=within, capture_id=capture_id)
                except exc.ResiduumError as failure:
                    search.missed(store, failure)
                else:
                    self._stores.found(capture_id, store)
                    return store
        raise search.failure()

    def _call(
        self,
        endpoint: str,
        method: Callable[..., _Answer],
        request: Any,
        *,
        extra: float = 0.0,
        within: Deadline | None = None,
        **facts: str,
    ) -> _Answer:
        """Make a unary call with the client's timeout plus `extra` seconds, but not beyond `within`."""
        for_tenant(request, self._tenant)
        limits = [None if self._timeout is None else self._timeout + extra, within.remaining() if within else None]
        try:
            answer = method(request, timeout=min((limit for limit in limits if limit is not None), default=None))
        except grpc.RpcError as error:
            has_answered = self._channels.has_answered(endpoint)
            failure = from_rpc_error(error, endpoint, has_answered=has_answered, **facts)
            raise self._explained(failure, endpoint) from None
        self._channels.note_answer(endpoint)
        return answer

    def _explained(self, failure: exc.ResiduumError, endpoint: str) -> exc.ResiduumError:
        """Return the exception for a failed call. If a store is where the inference service should be, it says so."""
        if endpoint != self.endpoint or not is_unknown_call(failure):
            return failure
        try:
            self._store(endpoint).DescribeStore(store_pb2.DescribeStoreRequest(), timeout=DESCRIBE_SECONDS)
        except grpc.RpcError:
            return failure
        return exc.InvalidRequest(
            f"This is a store, not an inference service: {endpoint}. Give the address of the inference service. To "
            f"read captures from this store alone, name it: Client(store='{endpoint}').",
            reason="INVALID_FIELD",
            metadata={"endpoint": endpoint},
        )

    def _read(self, reading: Reading, timeout: float | None) -> Iterator[bytes]:
        """Yield the messages of a read. If the connection breaks, read again; `reading` ignores repeated rows."""
        capture_id, moved = reading.request.capture_id, False
        deadline = Deadline(timeout)
        self._known_stores(deadline)
        retries = ReadRetries(deadline)
        call, memory, endpoint, ended = None, None, "", False
        while True:
            try:
                endpoint = self._find(capture_id, deadline)
                memory = None if retries.is_failing else self._borrow_memory(endpoint, deadline)
                reading.begin(memory)
                call = self._reader(endpoint)(for_tenant(reading.request, self._tenant), timeout=deadline.remaining())
                for data in call:
                    retries.progress()
                    self._channels.note_answer(endpoint)
                    yield data
                    if memory is not None:
                        memory.release()
                ended = True
            except (grpc.RpcError, exc.ResiduumError) as error:
                failure = self._as_own(error, endpoint, capture_id=capture_id)
                delay = retries.seconds_after(failure, self._patience(failure))
                if delay is None:
                    moved = not moved and reading.is_at_start and isinstance(failure, exc.UnknownCapture)
                    if not moved or not self._may_be_elsewhere([capture_id], deadline):
                        raise (retries.verdict(failure) or reading.explain(failure)) from None
                    delay = 0.0
            else:
                return
            finally:
                if call is not None:
                    call.cancel()
                if memory is not None:
                    memory.release(now=True)
                    self._memories.give_back(memory, clean=ended)
                    memory = None
            io.sleep(delay)

    def _as_own(self, error: grpc.RpcError | exc.ResiduumError, endpoint: str, **facts: str) -> exc.ResiduumError:
        """Return the exception of this package for an error that ended a read."""
        if isinstance(error, exc.ResiduumError):
            return error
        has_answered = self._channels.has_answered(endpoint)
        return from_rpc_error(error, endpoint, has_answered=has_answered, **facts)

    def _patience(self, failure: exc.ResiduumError) -> float:
        """Return how many seconds a read without a timeout waits for a store that is away."""
        endpoint = failure.endpoint if isinstance(failure, exc.Unreachable) else ""
        if self._timeout is None or not endpoint or self._channels.has_answered(endpoint):
            return LONGEST_OUTAGE_SECONDS
        return self._timeout

    def _reader(self, endpoint: str) -> grpc.UnaryStreamMultiCallable[store_pb2.ReadChunksRequest, bytes]:
        # Without a deserializer, rows are copied straight from the message's bytes to their place.
        return self._channels.get(endpoint, "reads").unary_stream(
            READ_CHUNKS,
            request_serializer=store_pb2.ReadChunksRequest.SerializeToString,
            response_deserializer=None,
        )

    def _read_many(
        self,
        plan: ReadPlan,
        capture_ids: Sequence[str],
        timeout: float | None,
        *,
        lane: int = 0,
        stop: io.Stop | None = None,
    ) -> Iterator[Activations]:
        """Yield the activations of captures, store by store, and of one store in the order of `capture_ids`.

        Captures that the read waits for come as they end, or when the archive works again. Reads in different lanes use
        different connections. `stop` ends it.

        Raises:
            UnknownCapture: No store holds some of the captures; the message names them.
        """
        deadline, searched, stop = Deadline(timeout), set[str](), stop or io.Stop()
        known = self._known_stores(deadline)
        is_only = len(known) == 1
        missed: dict[str, exc.ResiduumError] = {}
        waiting = deque(self._stores.by_likely_store(capture_ids, known))
        while waiting:
            endpoint, names = waiting.popleft()
            reading = ManyReading(plan, names)
            is_guess = not all(map(self._stores.known, names))
            try:
                for data in self._read_portion(reading, endpoint, deadline, lane, stop, is_guess=is_guess):
                    is_guess = False  # a store first names the captures that it lacks, so it has the others
                    yield from reading.add(data)
                    missed |= reading.take_unknown()
                    if missed and is_only:  # no other store can have them, so fail before reading the rows
                        is_only = len(self._refreshed_stores(deadline)) == 1
                        if is_only:
                            raise not_found(list(missed.values()), len(capture_ids))
            except exc.Unavailable as failure:
                if not is_guess:
                    raise
                # If the likely store was away when the capture was opened, another store has it.
                missed |= dict.fromkeys(reading.left, failure)
            if missed and not waiting:
                waiting.extend(self._elsewhere(missed, searched, len(capture_ids), deadline))
                missed = {}

    def _elsewhere(
        self, missed: Mapping[str, exc.ResiduumError], searched: set[str], total: int, deadline: Deadline
    ) -> Iterable[tuple[str, Sequence[str]]]:
        """Search all stores for captures that their likely stores do not have.

        Args:
            missed: The captures, and the failures of their likely stores.
            searched: The captures of earlier searches. `missed` is added to them.
            total: The number of captures being read.
            deadline: The deadline of the read.

        Returns:
            The captures by their store's endpoint.

        Raises:
            UnknownCapture: No store has some of the captures.
            Unavailable: A store does not answer the search, or the store of a capture cannot be read.
        """
        if not self._may_be_elsewhere(missed, deadline) or not searched.isdisjoint(missed):
            raise not_found(list(missed.values()), total)
        searched.update(missed)
        unknown: list[exc.ResiduumError] = []
        for capture_id in missed:
            try:
                self._find_in_time(capture_id, deadline)
            except exc.UnknownCapture as failure:
                unknown.append(failure)
        if unknown:
            raise not_found(unknown, total)
        return self._stores.by_likely_store(missed, self._known_stores(deadline))

    def _find_in_time(self, capture_id: str, deadline: Deadline) -> None:
        """Find the store of a capture. If a store that may have it is away, retry as reads do."""
        retries = ReadRetries(deadline)
        while True:
            try:
                self._find(capture_id, deadline)
            except exc.ResiduumError as failure:
                delay = retries.seconds_after(failure, self._patience(failure))
                if delay is None:
                    raise (retries.verdict(failure) or failure) from None
            else:
                return
            io.sleep(delay)

    def _read_portion(
        self, reading: ManyReading, endpoint: str, deadline: Deadline, lane: int, stop: io.Stop, *, is_guess: bool
    ) -> Iterator[bytes]:
        """Yield the messages of a read of many captures. If the connection breaks, request the rest again.

        Args:
            reading: The state of the read.
            endpoint: The store.
            deadline: The deadline of the read.
            lane: The connection to use.
            stop: Ends the read.
            is_guess: Whether another store may have the captures. If so, do not wait for this store if it is away at
                the start.
        """
        retries = ReadRetries(deadline)
        while reading.left:
            memory, ended = None if retries.is_failing else self._borrow_memory(endpoint, deadline), False
            call = self._many_reader(endpoint, lane)(
                for_tenant(reading.request(memory), self._tenant), timeout=deadline.remaining()
            )
            stop.watch(call)
            try:
                for data in call:
                    self._channels.note_answer(endpoint)
                    is_guess = False
                    yield data
                    if reading.take_progress():
                        retries.progress()
                    if memory is not None:
                        memory.release()
                ended = True
                reading.check_done()
            except (grpc.RpcError, exc.ArchiveUnreachable) as error:
                failure = self._as_own(error, endpoint)
                gives_up = is_guess or stop.is_requested
                delay = None if gives_up else retries.seconds_after(failure, self._patience(failure))
                if delay is None:
                    raise (retries.verdict(failure) or reading.explain(failure)) from None
            else:
                return
            finally:
                call.cancel()
                if memory is not None:
                    memory.release(now=True)
                    self._memories.give_back(memory, clean=ended)
            io.sleep(delay)

    def _many_reader(
        self, endpoint: str, lane: int
    ) -> grpc.UnaryStreamMultiCallable[store_pb2.ReadCapturesRequest, bytes]:
        return self._channels.get(endpoint, f"reads {lane}" if lane else "reads").unary_stream(
            READ_CAPTURES,
            request_serializer=store_pb2.ReadCapturesRequest.SerializeToString,
            response_deserializer=None,
        )
