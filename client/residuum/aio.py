"""The asyncio client: the methods of `residuum.Client`, to be awaited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from residuum import exceptions as exc
from residuum.captures.aio import AsyncCaptureClient
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
from residuum.transport.batches import check_prompts, run_async_batch
from residuum.transport.streams import AsyncStream, next_delta
from residuum.v1 import inference_pb2
from residuum.values.capture import Capture
from residuum.values.manifest import to_datetime
from residuum.values.replies import Health, PutResult, Registration, Reply
from residuum.values.steering import Operation, operation_list
from residuum.values.vector import Vector

if TYPE_CHECKING:
    from types import TracebackType

    import grpc.aio
    from typing_extensions import Self, Unpack

    from residuum.protocol.requests import Sampling
    from residuum.rpc.credentials import TLS
    from residuum.transport.connection_settings import Token
    from residuum.transport.streams import AsyncCall


class AsyncClient(AsyncCaptureClient):
    """An asyncio client of one inference service and of its stores; see `Client` for the arguments.

    Use it within one event loop.

    Example:
        >>> async with residuum.AsyncClient("localhost:50051") as client:
        ...     reply = await client.generate("The capital of France is", capture=residuum.Capture(layers=[12]))
        ...     acts = await client.activations(reply.request_id)
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
    ) -> None:
        super().__init__(endpoint, store=store, timeout=timeout, token=token, tls=tls, insecure=insecure, tenant=tenant)
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
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Reply:
        """Generate, and return the whole reply; see `Client.generate`. Cancelling the task stops the request.

        Example:
            >>> (await client.generate("The capital of France is", max_tokens=4)).text
            ' Paris. The capital'
        """
        stream = self.stream(
            prompt, capture=capture, steer=steer, request_id=request_id, registration=registration, model=model,
            updatable=updatable, timeout=timeout, **sampling,
        )  # fmt: skip
        with tracing.span("client.generate"):
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
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """Return the tokens of a generation as they are made; see `Client.stream`.

        It starts when the stream is entered or first read. Leaving the block stops the request.

        Example:
            >>> async with client.stream("Once upon a time", max_tokens=64) as stream:
            ...     async for delta in stream:
            ...         print(delta.text, end="")
        """
        plan = plan_generation(
            prompt, capture=capture, steer=steer, request_id=request_id, registration=registration, model=model,
            updatable=updatable, sampling=sampling,
        )  # fmt: skip

        async def start() -> tuple[AsyncCall, ReplyBuilder]:
            return await self._start_providing(plan, timeout)

        return AsyncStream(start, self.endpoint, self.update_steering)

    async def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        capture: Capture | None = None,
        steer: Operation | Iterable[Operation] | None = None,
        model: str | None = None,
        timeout: float | None = None,
        max_concurrency: int = 32,
        progress: bool = True,
        **sampling: Unpack[Sampling],
    ) -> list[Reply]:
        """Generate for many prompts at once; see `Client.generate_many`.

        Raises:
            BatchFailed: Some prompts failed. It is raised when all others have ended, and holds their replies.
        """
        batch = check_prompts(prompts, sampling)
        operations = operation_list(steer)

        async def run(prompt: Prompt) -> Reply:
            return await self.generate(
                prompt, capture=capture, steer=operations, model=model, timeout=timeout, **sampling
            )

        return await run_async_batch(run, batch, max_concurrency=max_concurrency, progress=progress)

    async def register(
        self,
        *,
        capture: Capture | None = None,
        steer: Operation | Iterable[Operation] | None = None,
        request_id: str | None = None,
        model: str | None = None,
        updatable: bool = False,
    ) -> Registration:
        """Have a request validated in full before its prompt is there; see `Client.register`."""
        plan = plan_spec(capture, steer, request_id, model, updatable=updatable)
        request = inference_pb2.RegisterRequestRequest(spec=plan.spec)
        answer = await self._call(self.endpoint, self._inference.RegisterRequest, request, request_id=request_id or "")
        await self._send(vector_upload.only(plan.vectors, answer.missing_digests))
        self._ledger.add(plan.vectors)
        seconds = answer.time_to_live.seconds + answer.time_to_live.nanos / 1e9
        return Registration(answer.request_id, to_datetime(answer.expire_time), seconds, plan.vectors)

    async def put_vectors(self, vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> PutResult:
        """Send vectors, those that the server lacks; see `Client.put_vectors`."""
        given = vector_upload.vector_list(vectors)
        return vector_upload.put_result(given, await self._provide(given))

    async def find_missing_vectors(self, vectors: Vector | Iterable[Vector] | Mapping[int, Vector]) -> list[Vector]:
        """Return those of some vectors that the server lacks."""
        given = vector_upload.vector_list(vectors)
        missing: set[bytes] = set()
        for request in vector_upload.find_requests(given):
            answer = await self._call(self.endpoint, self._inference.FindMissingVectors, request)
            missing.update(answer.missing_digests)
        return vector_upload.only(given, missing)

    async def update_steering(
        self, request_id: RequestLike, steer: Operation | Iterable[Operation] | None
    ) -> tuple[int, ...]:
        """Change the steering of a request that is generating; see `Client.update_steering`."""
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
        """Stop a running request, or drop a registration; see `Client.abort`."""
        name = check_id(request_id)
        request = inference_pb2.AbortRequest(request_id=name)
        await self._call(self.endpoint, self._inference.Abort, request, request_id=name)

    async def health(self) -> Health:
        """Return whether the services are ready; see `Client.health`."""
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.endpoint!r})"

    async def _start_providing(self, plan: GenerationPlan, timeout: float | None) -> tuple[AsyncCall, ReplyBuilder]:
        await self._provide(plan.vectors)
        try:
            started = await self._start(plan, timeout)
        except exc.MissingVectors:
            if not plan.vectors:
                raise  # a registration of another client, whose vectors are not ours to send
            self._ledger.forget(plan.vectors)  # the server dropped them, or was started anew
            await self._provide(plan.vectors)
            started = await self._start(plan, timeout)
        self._stores.note(started[1].started.capture)
        return started

    async def _update(self, plan: SteeringPlan) -> inference_pb2.UpdateSteeringResponse:
        name = plan.request.request_id
        return await self._call(self.endpoint, self._inference.UpdateSteering, plan.request, request_id=name)

    async def _start(self, plan: GenerationPlan, timeout: float | None) -> tuple[AsyncCall, ReplyBuilder]:
        """Make the call, and wait until the request is accepted."""
        call = self._inference.Generate(plan.request, timeout=timeout)
        builder = ReplyBuilder()
        await next_delta(call, builder, self.endpoint)
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
