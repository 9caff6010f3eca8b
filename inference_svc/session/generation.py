"""One request from its first check to its seal."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from inference_svc.captures.keeper import NoAnswerError
from inference_svc.engine.engine import sampling_params
from inference_svc.metrics import InferenceMetrics
from inference_svc.requests.concurrency import Places
from inference_svc.requests.plans import count_spare_positions, engine_id, make_operations, make_plan
from inference_svc.requests.specs import (
    check_capture_size,
    check_demand,
    check_prompt,
    check_sampling,
    demand_of_steering,
    digests_of,
    directions_of,
    num_sequences,
    resolve_spec,
    resolve_steering,
)
from inference_svc.resources.projections import projection_of
from inference_svc.resources.vector_activator import VectorHold
from inference_svc.resources.vector_cache import missing_vectors, vector_name
from inference_svc.session.capture_ends import aborted_seal, blame, describe_capture
from inference_svc.taps.steps.demand import MAX_ENTRIES
from residuum.rpc import tracing
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, steering_pb2
from residuum.wire.limits import MAX_STEERING_CHANGES, MAX_STEERING_CHANGES_BYTES
from svc_common.logs import bind_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence

    from typing_extensions import Self

    from inference_svc.captures.stores import Stores
    from inference_svc.engine.engine import Delta, Engine
    from inference_svc.requests.registry import RequestRegistry, Running
    from inference_svc.resources.projections import Projections
    from inference_svc.resources.vector_activator import VectorActivator
    from inference_svc.resources.vector_cache import VectorCache


_T = TypeVar("_T")

_ANSWER_SECONDS = 5.0
"""How long the end of a request waits for the engine's answer to a change of its steering. It comes between two steps,
and a step may wait for the store for as long as that is away."""


@dataclass
class _Sequence:
    """What has been generated of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""
    engine_tokens: int = 0
    """Tokens that the engine has made; those that were not handed to the client yet are among them."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine makes no more."""


@dataclass(frozen=True)
class _Change:
    """A change of the steering."""

    steering: steering_pb2.SteeringSpec
    firsts: Sequence[int | None]
    """Of each sequence the first position that is steered so; None if it had ended."""


@dataclass(frozen=True)
class _Ended:
    """The end of one of a request's generators."""

    error: BaseException | None = None


class Generator:
    """Runs requests: checks, vectors, capture, engine, seal."""

    def __init__(
        self,
        engine: Engine,
        registry: RequestRegistry,
        cache: VectorCache,
        activator: VectorActivator,
        projections: Projections,
        stores: Stores | None,
        metrics: InferenceMetrics | None = None,
        places: Places | None = None,
    ) -> None:
        """Put the parts together; `stores` is None if there is none. Each request takes one of the `places`."""
        self._engine = engine
        self._registry = registry
        self._cache = cache
        self._activator = activator
        self._projections = projections
        self._stores = stores
        self._metrics = metrics or InferenceMetrics()
        self._runs: dict[str, _Run] = {}
        self._places = places or Places()

    async def run(
        self, request: inference_pb2.GenerateRequest, tenant: str = ""
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Run a request of a tenant; its events are those of InferenceService.Generate.

        Raises:
            Failure: It cannot be run, or was aborted.
        """
        with self._metrics.request() as watch, self._places.taken(tenant):
            check_sampling(request.sampling)
            # Before the registration is used up: a bad prompt leaves it as it is.
            token_ids = await self._engine.tokenize(request)
            check_prompt(token_ids, request.sampling, self._engine.facts)
            running = self._start(request, tenant)
            bind_request(running.request_id)
            tracing.set_attributes(request_id=running.request_id, prompt_tokens=len(token_ids))
            tracing.add_event("checked")
            async with self._begun(running, token_ids, request.sampling) as run, aclosing(run.events()) as events:
                watch.begin(len(token_ids))
                tracing.add_event("queued")  # its vectors are active, and its capture is open
                has_tokens = False
                async for event in events:
                    watch.add_tokens(len(event.delta.token_ids))
                    if event.HasField("delta") and not has_tokens:
                        has_tokens = True
                        tracing.add_event("first token")
                    yield event
                tracing.add_event("generated")

    async def update_steering(self, request_id: str, spec: steering_pb2.SteeringSpec, tenant: str = "") -> list[int]:
        """Change the steering of a tenant's running request; see InferenceService.UpdateSteering.

        Returns:
            The first position of each sequence that is steered so.

        Raises:
            Failure: It cannot be changed, or not so.
        """
        running = self._registry.get_running(request_id, tenant)
        if running.spec.steering is None or not running.spec.steering.updatable:
            raise Failure(
                Reason.ERROR_REASON_NOT_UPDATABLE,
                f"The steering of the request {request_id!r} cannot be changed; start it as updatable for that.",
                request_id=request_id,
            )
        steering = resolve_steering(spec, self._engine.facts)
        steering.ClearField("updatable")  # it is so, whatever is said now
        self._check_vectors(tenant, digests_of(steering), steering)
        run = self._runs.get(running.path)
        if run is None:
            raise _ended_failure(running)
        return await run.change_steering(steering)

    def _start(self, request: inference_pb2.GenerateRequest, tenant: str) -> Running:
        if request.WhichOneof("target") == "request_id":
            return self._registry.start_registered(request.request_id, tenant)
        return self._registry.start_inline(resolve_spec(request.spec, self._engine.facts), tenant)

    @asynccontextmanager
    async def _begun(
        self, running: Running, token_ids: list[int], sampling: inference_pb2.SamplingParameters
    ) -> AsyncIterator[_Run]:
        began = False
        try:
            check_capture_size(running.spec.capture, len(token_ids), sampling)
            self._check_vectors(running.tenant, running.spec.digests, running.spec.steering)
            async with VectorHold(self._activator, running.tenant) as hold, AsyncExitStack() as signs:
                aborted = partial(_aborted_failure, running)
                if running.spec.digests:
                    await _unless(running.aborted, aborted, hold.add(running.spec.digests))
                projection = projection_of(running.spec.capture)
                if projection is not None:
                    held = signs.enter_async_context(self._projections.held(projection))
                    await _unless(running.aborted, aborted, held)
                handle = await self._open_capture(running, token_ids, sampling)
                began = True
                run = _Run(self._engine, running, token_ids, sampling, hold, handle)
                self._runs[running.path] = run
                try:
                    async with run:
                        yield run
                except Exception as error:
                    run.failure = error
                    raise
                finally:
                    self._seal(run)
                    run.failure = None  # whose traceback leads to the run: a cycle, which only a collection would free
        finally:
            self._runs.pop(running.path, None)
            (self._registry.end if began else self._registry.release)(running)

    def _check_vectors(self, tenant: str, digests: Sequence[bytes], steering: steering_pb2.SteeringSpec | None) -> None:
        self._cache.check_number(len(digests))
        missing = self._cache.missing(vector_name(tenant, digest) for digest in digests)
        if missing:
            raise missing_vectors(missing)
        for digest in directions_of(steering) if steering else ():
            self._cache.check_direction(vector_name(tenant, digest))

    async def _open_capture(
        self, running: Running, token_ids: Sequence[int], sampling: inference_pb2.SamplingParameters
    ) -> inference_pb2.CaptureHandle | None:
        if running.spec.capture is None:
            return None
        stores = require_stores(self._stores)
        description = describe_capture(self._engine.facts, running, token_ids, num_sequences(sampling))
        try:
            await stores.open(description, is_new_id=not running.spec.request_id)
        except (asyncio.CancelledError, NoAnswerError):
            # The store may have opened the capture: nobody else would ever end it.
            self._registry.end(running)
            unheard = [capture_pb2.SequenceOutcome(finish_reason="abort")] * num_sequences(sampling)
            stores.seal(aborted_seal(running, unheard))
            raise
        return stores.handle(running.request_id)

    def _seal(self, run: _Run) -> None:
        """Seal the run's capture, if it has one, however the run ended."""
        if run.handle is None:
            return
        seal = aborted_seal(run.running, run.outcomes(default="abort"))
        seal.steering_changes.extend(run.steering_changes())
        if run.has_generated:
            seal.outcome = capture_pb2.CAPTURE_STATE_COMPLETE
        elif run.failure is not None and not _is_abort(run.failure):
            blame(seal, run.failure)  # where the client dropped the stream, there is no failure: ABORTED as well
        require_stores(self._stores).seal(seal)


class _Run:
    """The generation itself, of one or more sequences."""

    def __init__(
        self,
        engine: Engine,
        running: Running,
        token_ids: Sequence[int],
        sampling: inference_pb2.SamplingParameters,
        vectors: VectorHold,
        handle: inference_pb2.CaptureHandle | None,
    ) -> None:
        self._engine = engine
        self.running = running
        self._token_ids = token_ids
        self._sampling = sampling
        self._vectors = vectors
        self.handle = handle
        self._entries: dict[bytes, int] = {}
        """Entries of the taps' tables that each steering takes, by its bytes. Empty: it was never to be changed."""
        self._changes: list[_Change] = []
        self._changing = asyncio.Lock()
        """Held from before a change is checked until it is recorded."""
        self._is_over = asyncio.Event()
        """Set when the steering cannot be changed any more."""
        self._gives_up = asyncio.Event()
        """Set when the engine's answer to a change is not waited for any more."""
        self._remembers = False
        """Whether the workers may remember a change of a sequence that has not come to them."""
        self.has_generated = False
        """Whether every sequence has ended by itself."""
        self.failure: Exception | None = None
        """What it ended by, if that was an error."""
        self._sequences = [_Sequence() for _ in range(num_sequences(sampling))]
        self._queue: asyncio.Queue[tuple[int, Delta] | _Ended] = asyncio.Queue()

    def outcomes(self, default: str) -> list[capture_pb2.SequenceOutcome]:
        """Return how the sequences ended; `default` is the finish reason of those that have not."""
        return [
            capture_pb2.SequenceOutcome(generated_token_ids=item.token_ids, finish_reason=item.finish_reason or default)
            for item in self._sequences
        ]

    def steering_changes(self) -> list[steering_pb2.SteeringChange]:
        """Return how the steering was changed, in order."""
        return [
            steering_pb2.SteeringChange(
                steering=change.steering,
                first_positions=self._first_positions(change.firsts),
            )
            for change in self._changes
        ]

    async def change_steering(self, steering: steering_pb2.SteeringSpec) -> list[int]:
        """Steer otherwise from the next step on; return the first position of each sequence that is steered so.

        Raises:
            Failure: There is no room for it, or the request ends.
        """
        await self._changing.acquire()
        try:
            self._check_change(steering)
            await _unless(self._is_over, partial(_ended_failure, self.running), self._vectors.add(digests_of(steering)))
        except BaseException:
            self._changing.release()
            raise
        # In a task of its own: whoever asked may go away, but a change that reached the engine must be recorded.
        change = asyncio.create_task(self._apply(steering))
        change.add_done_callback(lambda _: self._changing.release())
        firsts = await asyncio.shield(change)
        for sequence, first in zip(self._sequences, firsts, strict=True):
            if first is None:
                await sequence.has_ended.wait()  # its last tokens are under way
        return self._first_positions(firsts)

    async def __aenter__(self) -> Self:
        """Let the steering be changed for as long as the context lasts; it ends when no change is under way."""
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._is_over.set()
        for item in self._sequences:
            item.has_ended.set()
        if self._changing.locked():
            timer = asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._gives_up.set)
            async with self._changing:  # those that came before are recorded, or gave up
                timer.cancel()
        if self._remembers:
            await self._forget()

    async def _apply(self, steering: steering_pb2.SteeringSpec) -> list[int | None]:
        """Let the engine change the steering, and record it; return the first position of each sequence.

        Raises:
            Failure: The engine is dead, or the request has ended and the engine has not answered for long. Then it
                answers behind all that it computes for the request, and the change has changed nothing.
        """
        operations = make_operations(steering, self._vectors.rows)
        names = [self._name(index) for index, item in enumerate(self._sequences) if not item.has_ended.is_set()]
        answers: dict[str, int | None] = {}
        if names:
            self._remembers, remembered = True, self._remembers
            call = self._engine.change_steering(dict.fromkeys(names, operations))
            answers = await _unless(self._gives_up, partial(_ended_failure, self.running), call)
            self._remembers = remembered or 0 in answers.values()
        firsts = [answers.get(self._name(index)) for index in range(len(self._sequences))]
        self._changes.append(_Change(steering, firsts))
        self._entries[_key_of(steering)] = self._entries_of(steering)
        return firsts

    async def _forget(self) -> None:
        names = [self._name(index) for index in range(len(self._sequences))]
        with suppress(Failure, asyncio.TimeoutError):  # the engine has died, or hears it later
            await asyncio.wait_for(self._engine.forget(names), _ANSWER_SECONDS)

    def _check_change(self, steering: steering_pb2.SteeringSpec) -> None:
        """Check that a change can be made.

        Raises:
            Failure: The request ends, or was changed too often.
        """
        if self._is_over.is_set():
            raise _ended_failure(self.running)
        # Before the answer, the positions are taken for as long as they can be.
        firsts = [self._engine.facts.max_model_len] * len(self._sequences)
        changes = [
            steering_pb2.SteeringChange(steering=item, first_positions=firsts)
            for item in [*(change.steering for change in self._changes), steering]
        ]
        if len(changes) > MAX_STEERING_CHANGES or _size(changes) > MAX_STEERING_CHANGES_BYTES:
            raise self._changed_too_often(
                f"at most {MAX_STEERING_CHANGES} changes of {MAX_STEERING_CHANGES_BYTES >> 10} KiB together fit its "
                "manifest"
            )
        demand = demand_of_steering(steering, self.running.spec.capture)
        check_demand(demand)
        # A step that computes the request again after a preemption may steer some of its rows in each of these ways.
        # They are no more programs than the step has rows, for which there is room.
        start = self.running.spec.steering
        self._entries = self._entries or {_key_of(start): self._entries_of(start)}
        entries = sum({**self._entries, _key_of(steering): demand.entries}.values())
        if entries > MAX_ENTRIES:
            raise self._changed_too_often(
                f"all that it was steered by would take {entries} entries of the taps' tables, and it has {MAX_ENTRIES}"
            )

    def _changed_too_often(self, why: str) -> Failure:
        return Failure(
            Reason.ERROR_REASON_LIMIT_REACHED,
            f"The steering of {self.running.request_id!r} was changed {len(self._changes)} times; {why}.",
            limit="steering_changes",
        )

    def _entries_of(self, steering: steering_pb2.SteeringSpec | None) -> int:
        return demand_of_steering(steering, self.running.spec.capture).entries

    def _name(self, index: int) -> str:
        return engine_id(self.running.path, index)

    def _first_positions(self, firsts: Sequence[int | None]) -> list[int]:
        return [
            first if first is not None else len(self._token_ids) + sequence.engine_tokens
            for sequence, first in zip(self._sequences, firsts, strict=True)
        ]

    async def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yield the events of the generation, in the order that the contract gives."""
        tasks = [asyncio.create_task(self._generate(index)) for index in range(len(self._sequences))]
        self.running.on_abort = self._end_by_abort
        if self.running.aborted.is_set():  # since before anybody was to be told
            self._end_by_abort()
        try:
            yield inference_pb2.GenerateResponse(
                started=inference_pb2.GenerationStarted(
                    request_id=self.running.request_id, prompt_token_ids=self._token_ids, capture=self.handle
                )
            )
            open_sequences = len(self._sequences)
            while open_sequences:
                deltas, ends = await self._news()
                for index, delta in deltas.items():
                    yield self._delta(index, delta)
                for end in ends:
                    if end.error is not None:
                        try:
                            raise end.error
                        finally:
                            del end, ends  # the error's traceback has this frame: else a cycle, until a collection
                    open_sequences -= 1
        finally:
            self.running.on_abort = None
            await _stopped(tasks)  # closes the engine's generators, which stops their requests
        self.has_generated = True
        yield inference_pb2.GenerateResponse(finished=self._finished())

    async def _news(self) -> tuple[dict[int, Delta], list[_Ended]]:
        """Wait for news, and return all there is: what has come of a sequence meanwhile is one delta.

        So a client that reads slowly, or a service that is behind the engine, has fewer messages instead of a queue.
        """
        deltas: dict[int, Delta] = {}
        ends: list[_Ended] = []
        item = await self._queue.get()
        while True:
            if isinstance(item, _Ended):
                ends.append(item)
            else:
                index, delta = item
                deltas[index] = deltas[index].followed_by(delta) if index in deltas else delta
            if self._queue.empty():
                return deltas, ends
            item = self._queue.get_nowait()

    async def _generate(self, index: int) -> None:
        try:
            stream = self._engine.generate(
                self._name(index),
                self._token_ids,
                sampling_params(self._sampling, index),
                make_plan(
                    self.running,
                    index,
                    len(self._token_ids),
                    self._vectors.rows,
                    count_spare_positions(self._sampling),
                ),
                self.running.cache_salt(len(self._token_ids)),
            )
            async for delta in stream:
                self._sequences[index].engine_tokens += len(delta.token_ids)
                self._queue.put_nowait((index, delta))
        except Exception as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._queue.put_nowait(_Ended(error))
        else:
            self._queue.put_nowait(_Ended())
        finally:
            self._sequences[index].has_ended.set()

    def _end_by_abort(self) -> None:
        self._queue.put_nowait(_Ended(_aborted_failure(self.running)))

    def _delta(self, index: int, delta: Delta) -> inference_pb2.GenerateResponse:
        sequence = self._sequences[index]
        sequence.token_ids.extend(delta.token_ids)
        sequence.finish_reason = delta.finish_reason or ""
        sequence.stop_reason = delta.stop_reason
        return inference_pb2.GenerateResponse(
            delta=inference_pb2.TokenDelta(sequence=index, text=delta.text, token_ids=delta.token_ids)
        )

    def _finished(self) -> inference_pb2.GenerationFinished:
        return inference_pb2.GenerationFinished(
            sequences=[
                inference_pb2.SequenceFinish(
                    finish_reason=item.finish_reason,
                    stop_reason=item.stop_reason,
                    generated_tokens=len(item.token_ids),
                )
                for item in self._sequences
            ],
            usage=inference_pb2.Usage(
                prompt_tokens=len(self._token_ids),
                generated_tokens=sum(len(item.token_ids) for item in self._sequences),
            ),
            capture=self.handle,
        )


def require_stores(stores: Stores | None) -> Stores:
    """Return the stores.

    Raises:
        Failure: The service was started without a store.
    """
    if stores is None:
        raise Failure(
            Reason.ERROR_REASON_STORE_UNREACHABLE,
            "This server was started without a store and captures nothing; start it with --store HOST:PORT.",
            endpoint="",
        )
    return stores


def _is_abort(error: Exception) -> bool:
    return isinstance(error, Failure) and error.reason == Reason.ERROR_REASON_ABORTED


def _key_of(steering: steering_pb2.SteeringSpec | None) -> bytes:
    """Return what tells different operations apart."""
    return steering_pb2.SteeringSpec(operations=steering.operations if steering else ()).SerializeToString(
        deterministic=True
    )


def _size(changes: Sequence[steering_pb2.SteeringChange]) -> int:
    return sum(change.ByteSize() for change in changes)


def _aborted_failure(running: Running) -> Failure:
    return Failure(
        Reason.ERROR_REASON_ABORTED, f"The request {running.request_id!r} was aborted.", request_id=running.request_id
    )


def _ended_failure(running: Running) -> Failure:
    return Failure(
        Reason.ERROR_REASON_UNKNOWN_REQUEST,
        f"The request {running.request_id!r} has not begun to generate, or has just ended; wait for its started event.",
        request_id=running.request_id,
    )


async def _stopped(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Stop tasks, unless they have ended, and wait for their end."""
    unfinished = [task for task in tasks if not task.done()]
    for task in unfinished:
        task.cancel()
    if unfinished:
        await asyncio.gather(*unfinished, return_exceptions=True)


async def _unless(event: asyncio.Event, failure: Callable[[], Failure], work: Coroutine[object, object, _T]) -> _T:
    """Return what `work` returns, or stop it.

    Raises:
        Failure: The event was set meanwhile.
    """
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise failure()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
