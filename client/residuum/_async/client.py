"""The asyncio client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from residuum import exceptions as exc
from residuum._async import io
from residuum._async.batches import run_as_completed, run_batch
from residuum._async.captures import AsyncCaptureClient
from residuum._async.streams import AsyncStream, make_stream
from residuum._async.tokens import accept
from residuum.protocol import vector_upload
from residuum.protocol.events import ReplyBuilder
from residuum.protocol.requests import (
    GenerationPlan,
    Prompt,
    RequestLike,
    SteeringPlan,
    check_id,
    plan_generation,
    plan_spec,
    plan_steering,
)
from residuum.rpc import tracing
from residuum.transport import health
from residuum.transport.batches import BatchPlan, Steering
from residuum.v1 import inference_pb2
from residuum.values.capture import Capture
from residuum.values.manifest import to_datetime
from residuum.values.replies import Health, PutResult, Registration, Reply
from residuum.values.steering import Operation
from residuum.values.vector import Vector

if TYPE_CHECKING:
    from types import TracebackType

    import grpc.aio
    from typing_extensions import Self, Unpack

    from residuum.protocol.requests import IfExists
    from residuum.protocol.sampling import Sampling
    from residuum.rpc.credentials import TLS
    from residuum.transport.connection_settings import Token


class AsyncClient(AsyncCaptureClient):
    """An asyncio client of one inference service and of the stores that its captures go to.

    Channels are opened when they are first used. Use a client within one event loop. Close it, or use
    it in an async with-block.

    Args:
        endpoint: The inference service, host:port.
        store: The store or stores; by default the inference service says where they are. Name them if its answer does
            not work from here, as behind a tunnel: as host:port, or, of several, as name=host:port with the names that
            the inference service calls them by (`client.info().stores`), so that each capture is looked for in its
            own store first.
        timeout: Seconds after which a call fails with DeadlineExceeded; None means never. Generations and reads have
            no deadline but their own `timeout=`. A read without one waits this long for a store that this client has
            never reached, and 5 minutes for one that it has (also if this is None).
        token: The bearer token that both services ask for, or a path to the file that holds it, which is read again
            when it changes; "" sends none. Default: RESIDUUM_TOKEN, or RESIDUUM_TOKEN_FILE.
        tls: A `residuum.TLS`; True trusts public CAs; False speaks plain text. Default: RESIDUUM_TLS_CA,
            RESIDUUM_CLIENT_CERT, RESIDUUM_CLIENT_KEY, RESIDUUM_TLS_SERVER_NAME, or RESIDUUM_TLS=1 for public CAs.
        insecure: Let a token go to another machine in plain text. Default: RESIDUUM_INSECURE, or not.
        tenant: The tenant whose captures are read, listed and deleted; only the tokens of admins may name one.
            Default: the token's own tenant; lists for an admin then show all tenants.
        shared_memory: Whether rows of a store on the same machine may pass through shared memory, which is faster. The
            client finds out by itself whether that works; see `shared_memory_problems`. RESIDUUM_SHARED_MEMORY=off
            switches it off for all clients.

    Raises:
        BadCredentials: A file of these cannot be read, or the token would go to another machine in plain text.

    Example:
        >>> async with residuum.AsyncClient("localhost:50051") as client:
        ...     reply = await client.generate("The capital of France is", capture=residuum.Capture(layers=[12]))
        ...     acts = await client.activations(reply.request_id)
        >>> acts[12].shape
        (20, 576)
    """

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
        shared_memory: bool = True,
    ) -> None:
        super().__init__(
            endpoint, store=store, timeout=timeout, token=token, tls=tls, insecure=insecure, tenant=tenant,
            shared_memory=shared_memory,
        )  # fmt: skip
        self._ledger = vector_upload.VectorLedger()

    async def generate(
        self,
        prompt: Prompt,
        *,
        capture: Capture | None = None,
        steer: Operation | Iterable[Operation] | None = None,
        request_id: str | None = None,
        registration: Registration | str | None = None,
        model: str | None = None,
        updatable: bool = False,
        if_exists: IfExists = "fail",
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Reply:
        """Generate text, and return the whole reply.

        Steering vectors that the server lacks are sent first, by themselves. Cancelling the task stops the request.

        Args:
            prompt: A text, a list of token ids, or a conversation as a list of {"role": ..., "content": ...}. If a
                conversation ends with a message of the assistant, the reply continues that message.
            capture: What to capture; None captures nothing.
            steer: How to steer: one operation, or several that are applied in their order.
            request_id: Your own name for the request and its capture; by default the server makes one.
            registration: A request that `register` answered; then capture, steer, request_id and model are its own.
            model: The model that you expect; another one is refused.
            updatable: Let `update_steering` change the steering while the request generates. Its prompt is then always
                computed: it shares no cache with other requests.
            if_exists: What to do if a capture with this request_id exists. "fail" raises CaptureExists. "replace"
                generates anew and replaces the capture, whatever it holds. "skip" returns what a complete capture of
                the same request holds, without generating (`reply.skipped`), and replaces one that is not complete. A
                capture of another request, or of one that is still running, is never skipped. The labels in `capture`
                are part of the request. A capture holds no log-probabilities, so "skip" refuses `logprobs`.
            timeout: Seconds that the generation may take; None means as long as it takes.
            **sampling: max_tokens (16; 0 only computes the prompt), temperature (0: greedy), n (sequences), logprobs,
                json_schema and others; see `residuum.Sampling`.

        Raises:
            InvalidRequest: The request is not valid; the subclass and the message say why.
            RequestExists: A request with this id is registered or running.
            CaptureExists: A capture with this id exists, and if_exists does not allow to replace or skip it.
            UnknownRequest: The registration was used up or has lapsed.
            StoreUnreachable: A capture is asked for and the inference service cannot reach its store.
            LimitReached: It uses more vectors than the server takes, or there was no room for them for too long.
            RequestAborted: Somebody called `abort`.
            Unreachable: Nothing answers at the endpoint.
            DeadlineExceeded: The time is over; the request was stopped.

        Example:
            >>> (await client.generate("The capital of France is", max_tokens=1)).text
            ' Paris'
        """
        with tracing.span("client.generate"):
            stream = self.stream(
                prompt, capture=capture, steer=steer, request_id=request_id, registration=registration, model=model,
                updatable=updatable, if_exists=if_exists, timeout=timeout, **sampling,
            )  # fmt: skip
            async with stream:
                async for _ in stream:
                    pass
            tracing.set_attributes(request_id=stream.reply.request_id)
        return stream.reply

    def stream(
        self,
        prompt: Prompt,
        *,
        capture: Capture | None = None,
        steer: Operation | Iterable[Operation] | None = None,
        request_id: str | None = None,
        registration: Registration | str | None = None,
        model: str | None = None,
        updatable: bool = False,
        if_exists: IfExists = "fail",
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """Return the tokens of a generation as they are made. The arguments are those of `generate`.

        The request starts when the stream is entered or first read. It is accepted then: its id is known, and its
        capture can be followed. Closing or dropping the stream stops the request.

        Example:
            >>> async with client.stream("Once upon a time", max_tokens=64) as stream:
            ...     async for delta in stream:
            ...         print(delta.text, end="")
        """
        plan = plan_generation(
            prompt, capture=capture, steer=steer, request_id=request_id, registration=registration, model=model,
            updatable=updatable, if_exists=if_exists, sampling=sampling,
        )  # fmt: skip

        async def start() -> tuple[io.Call, ReplyBuilder]:
            return await self._start(plan, timeout)

        return make_stream(start, self.endpoint, self.update_steering)

    async def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        capture: Capture | Iterable[Capture | None] | None = None,
        steer: Steering = None,
        request_ids: Iterable[str] | None = None,
        model: str | None = None,
        if_exists: IfExists = "fail",
        timeout: float | None = None,
        max_concurrency: int = 32,
        progress: bool = True,
        **sampling: Unpack[Sampling],
    ) -> list[Reply]:
        """Generate for many prompts at once.

        Args:
            prompts: The prompts; see `generate`, as for all other arguments.
            capture: What to capture of every prompt; or a list with one item for each prompt, a Capture or None.
            steer: How to steer every prompt: an operation, or several that are applied in their order. For another
                steering of each prompt, a list with one item for each: a list of its operations, or None.
            request_ids: Your own names for the requests and their captures, one for each prompt; by default the server
                makes them.
            model: The model that you expect.
            if_exists: What to do if a capture with a request's id exists, as for `generate`. With "skip", a job that
                was killed can be run again with the same ids: it generates only what is not complete. A prompt whose
                capture is None is always generated.
            timeout: Seconds that each generation may take.
            max_concurrency: How many run at once.
            progress: Show a progress bar, on a terminal or in Jupyter.
            **sampling: As for `generate`.

        Returns:
            The replies in the order of the prompts. `generate_as_completed` yields each when it is there.

        Raises:
            BatchFailed: Some prompts failed. It is raised when all others have ended, and holds their replies.
            BatchCancelled: The task was cancelled. It holds the replies of the prompts that were done.
            InvalidRequest: There is not one capture, one steering or one of the request_ids for each prompt, or two ids
                are the same.
            TypeError: The prompts are a single one, or an argument belongs to a single request, such as request_id.

        Example:
            >>> replies = await client.generate_many(["One", "Two"], capture=residuum.Capture(), max_tokens=8)
            >>> acts = [await client.activations(reply.request_id) for reply in replies]
            >>> both = await client.generate_many(["One", "One"], steer=[[Add(joy, layer=12)], None])
        """
        plan = BatchPlan.of(prompts, capture, steer, sampling, request_ids=request_ids, if_exists=if_exists)
        start = self._starter(plan, model=model, timeout=timeout, **sampling)
        return await run_batch(start, len(plan.prompts), max_concurrency=max_concurrency, progress=progress)

    def generate_as_completed(
        self,
        prompts: Iterable[Prompt],
        *,
        capture: Capture | Iterable[Capture | None] | None = None,
        steer: Steering = None,
        request_ids: Iterable[str] | None = None,
        model: str | None = None,
        if_exists: IfExists = "fail",
        timeout: float | None = None,
        max_concurrency: int = 32,
        progress: bool = True,
        **sampling: Unpack[Sampling],
    ) -> AsyncIterator[tuple[int, Reply]]:
        """Generate for many prompts at once, and yield each reply when it is there.

        The arguments are those of `generate_many`. Closing the generator stops the prompts that are running.

        Yields:
            The index of a prompt and its reply, in the order in which they end.

        Raises:
            BatchFailed: Some prompts failed. It is raised after the last reply, and holds all replies.
            InvalidRequest: There is not one capture, one steering or one of the request_ids for each prompt, or two ids
                are the same.
            TypeError: The prompts are a single one, or an argument belongs to a single request, such as request_id.

        Example:
            >>> async for index, reply in client.generate_as_completed(["One", "Two"], max_tokens=8):
            ...     print(index, reply.text)
        """
        plan = BatchPlan.of(prompts, capture, steer, sampling, request_ids=request_ids, if_exists=if_exists)
        start = self._starter(plan, model=model, timeout=timeout, **sampling)
        return run_as_completed(start, len(plan.prompts), max_concurrency=max_concurrency, progress=progress)

    async def register(
        self,
        *,
        capture: Capture | None = None,
        steer: Operation | Iterable[Operation] | None = None,
        request_id: str | None = None,
        model: str | None = None,
        updatable: bool = False,
        if_exists: IfExists = "fail",
    ) -> Registration:
        """Check a request in full before its prompt is known, and send the vectors that it needs.

        Registering the same again with the same id is harmless. A registration is used up by one `generate`, and
        lapses if it is not used (10 minutes by default). With several stores it also settles, by its id, which of them
        will have the capture: if that one goes away before `generate`, the request is refused until it is back, where
        one without a registration would have gone to another.

        Raises:
            InvalidRequest: The request is not valid; the subclass and the message say why.
            RequestExists: The request id is registered with another spec, or its request is running.
            LimitReached: Too many registrations are waiting.

        Example:
            >>> registration = await client.register(capture=residuum.Capture(layers="all"))
            >>> reply = await client.generate("Hello", registration=registration)
        """
        plan = plan_spec(capture, steer, request_id, model, updatable=updatable, if_exists=if_exists)
        request = inference_pb2.RegisterRequestRequest(spec=plan.spec)
        answer = await self._call(self.endpoint, self._inference.RegisterRequest, request, request_id=request_id or "")
        await self._send(vector_upload.only(plan.vectors, answer.missing_digests))
        self._ledger.add(plan.vectors)
        seconds = answer.time_to_live.seconds + answer.time_to_live.nanos / 1e9
        return Registration(answer.request_id, to_datetime(answer.expire_time), seconds, plan.vectors)

    async def put_vectors(self, vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> PutResult:
        """Send vectors, or those of Directions, that the server lacks. Calls that steer do this by themselves.

        Raises:
            BadVector: The server refused one; the others are accepted.

        Example:
            >>> (await client.put_vectors([joy])).sent, (await client.put_vectors([joy])).sent
            (1, 0)
        """
        given = vector_upload.vector_list(vectors)
        return vector_upload.put_result(given, await self._provide(given))

    async def find_missing_vectors(self, vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> list[Vector]:
        """Return those of the vectors that the server lacks. It keeps the others for longer."""
        given = vector_upload.vector_list(vectors)
        missing: set[bytes] = set()
        for request in vector_upload.find_requests(given):
            answer = await self._call(self.endpoint, self._inference.FindMissingVectors, request)
            missing.update(answer.missing_digests)
        return vector_upload.only(given, missing)

    async def update_steering(
        self, request_id: RequestLike, steer: Operation | Iterable[Operation] | None
    ) -> tuple[int, ...]:
        """Change the steering of a request that is generating, from its next token on.

        The request must have been started with `updatable=True`. Vectors that the server lacks are sent first.

        Args:
            request_id: The request, or its stream.
            steer: What takes the place of its steering; None or [] switches it off.

        Returns:
            Of each sequence the first position that is steered so; the manifest's `steering_changes` keep it.

        Raises:
            UnknownRequest: No such request is generating.
            NotUpdatable: It was not started as updatable.
            InvalidRequest: The steering is not valid; the subclass and the message say why.
            LimitReached: There is no room for more vectors, or the steering was changed too often.

        Example:
            >>> async with client.stream("Once", max_tokens=64, steer=[Add(joy, layer=12)], updatable=True) as stream:
            ...     await anext(stream)
            ...     await client.update_steering(stream, None)
            (5,)
        """
        plan = plan_steering(request_id, steer)
        await self._provide(plan.vectors)
        try:
            answer = await self._update(plan)
        except exc.MissingVectors:
            self._ledger.forget(plan.vectors)  # the server dropped them, or was started anew
            await self._provide(plan.vectors)
            answer = await self._update(plan)
        return tuple(answer.first_positions)

    async def abort(self, request_id: RequestLike) -> None:
        """Stop a running request, or drop a registration. Its capture ends aborted. An ended request stays as it is.

        Raises:
            UnknownRequest: There is no such request.
        """
        name = check_id(request_id)
        request = inference_pb2.AbortRequest(request_id=name)
        await self._call(self.endpoint, self._inference.Abort, request, request_id=name)

    async def health(self) -> Health:
        """Return whether each service is ready. A service that is not raises no error.

        Example:
            >>> (await client.health()).ok
            True
        """
        try:
            stores: Sequence[str] = await self.store_endpoints()
        except exc.ResiduumError:
            stores = ()  # what the inference service lacks shows in its own status
        inference = await self._status(self.endpoint)
        return Health(inference, {endpoint: await self._status(endpoint) for endpoint in stores})

    async def close(self) -> None:
        """Close the channels. Running streams are stopped; the client cannot be used afterwards."""
        for channel in self._channels.drain():
            await channel.close()
        self._memories.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.endpoint!r})"

    def _starter(
        self, plan: BatchPlan, *, model: str | None, timeout: float | None, **sampling: Unpack[Sampling]
    ) -> Callable[[int], AsyncStream]:
        """Return the function that starts the generation of the prompt with an index."""

        def start(index: int) -> AsyncStream:
            return self.stream(
                plan.prompts[index], capture=plan.captures[index], steer=plan.steering[index],
                request_id=plan.request_ids[index], model=model, if_exists=plan.if_exists[index], timeout=timeout,
                **sampling,
            )  # fmt: skip

        return start

    async def _update(self, plan: SteeringPlan) -> inference_pb2.UpdateSteeringResponse:
        name = plan.request.request_id
        return await self._call(self.endpoint, self._inference.UpdateSteering, plan.request, request_id=name)

    async def _start(self, plan: GenerationPlan, timeout: float | None) -> tuple[io.Call, ReplyBuilder]:
        """Start a generation, and wait until the request is accepted."""
        await self._provide(plan.vectors)
        try:
            call, builder = await self._generate(plan, timeout)
        except exc.MissingVectors:
            if not plan.vectors:
                raise  # a registration of another client, whose vectors this one does not have
            self._ledger.forget(plan.vectors)  # the server dropped them, or was started anew
            await self._provide(plan.vectors)
            call, builder = await self._generate(plan, timeout)
        self._stores.note(builder.started.capture)
        return call, builder

    async def _generate(self, plan: GenerationPlan, timeout: float | None) -> tuple[io.Call, ReplyBuilder]:
        call = self._inference.Generate(plan.request, timeout=timeout)
        builder = await accept(call, self.endpoint, has_answered=self._channels.has_answered(self.endpoint))
        self._channels.note_answer(self.endpoint)
        return call, builder

    async def _provide(self, vectors: Iterable[Vector]) -> list[Vector]:
        """Make sure that the server has these vectors; return those that were sent."""
        unknown = self._ledger.unknown(vectors)
        if not unknown:
            return []
        missing = await self.find_missing_vectors(unknown)
        await self._send(missing)
        self._ledger.add(unknown)
        return missing

    async def _send(self, vectors: Sequence[Vector]) -> None:
        for part in vector_upload.put_calls(vectors):
            answer = await self._call(self.endpoint, self._inference.PutVectors, vector_upload.put_requests(part))
            vector_upload.check_results(part, answer)

    async def _status(self, endpoint: str) -> str:
        # No serializers: bytes go in and come out.
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channels.get(endpoint).unary_unary(health.CHECK)
        try:
            return health.status_of_answer(await self._call(endpoint, check, health.REQUEST))
        except exc.ResiduumError as failure:
            return health.status_of_failure(failure)
