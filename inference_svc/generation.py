"""One request from its first check to its seal."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from inference_svc.captures import NoAnswerError
from inference_svc.engine import sampling_params
from inference_svc.plans import make_plan
from inference_svc.specs import check_capture_size, check_prompt, check_sampling, num_sequences, resolve_spec
from inference_svc.vectors import missing_vectors
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, store_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence

    from inference_svc.captures import CaptureKeeper
    from inference_svc.engine import Delta, Engine
    from inference_svc.requests import RequestRegistry, Running
    from inference_svc.vectors import VectorActivator, VectorCache


_T = TypeVar("_T")


@dataclass
class _Sequence:
    """What has been generated of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""


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
        keeper: CaptureKeeper | None,
    ) -> None:
        """Put the parts together; `keeper` is None if there is no store."""
        self._engine = engine
        self._registry = registry
        self._cache = cache
        self._activator = activator
        self._keeper = keeper

    async def run(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Run a request; its events are those of InferenceService.Generate.

        Raises:
            Failure: It cannot be run, or was aborted.
        """
        check_sampling(request.sampling)
        # Before the registration is used up: a bad prompt leaves it as it is.
        token_ids = self._engine.tokenize(request)
        check_prompt(token_ids, request.sampling, self._engine.facts)
        running = self._start(request)
        async with self._begun(running, token_ids, request.sampling) as run, aclosing(run.events()) as events:
            async for event in events:
                yield event

    def _start(self, request: inference_pb2.GenerateRequest) -> Running:
        if request.WhichOneof("target") == "request_id":
            return self._registry.start_registered(request.request_id)
        return self._registry.start_inline(resolve_spec(request.spec, self._engine.facts))

    @asynccontextmanager
    async def _begun(
        self, running: Running, token_ids: list[int], sampling: inference_pb2.SamplingParameters
    ) -> AsyncIterator[_Run]:
        began = False
        try:
            check_capture_size(running.spec.capture, len(token_ids), sampling)
            self._check_vectors(running)
            async with AsyncExitStack() as stack:
                rows = await _unless_aborted(
                    running, stack.enter_async_context(self._activator.active(running.spec.digests))
                )
                handle = await self._open_capture(running, token_ids, sampling)
                began = True
                run = _Run(self._engine, running, token_ids, sampling, rows, handle)
                async with self._sealed(run):
                    yield run
        finally:
            (self._registry.end if began else self._registry.release)(running)

    def _check_vectors(self, running: Running) -> None:
        missing = self._cache.missing(running.spec.digests)
        if missing:
            raise missing_vectors(missing)
        for digest in running.spec.directions:
            if self._cache.is_zero(digest):
                raise Failure(
                    Reason.ERROR_REASON_BAD_VALUES,
                    f"The vector {digest.hex()} is zero and has no direction to ablate or cap.",
                    digest=digest.hex(),
                )

    async def _open_capture(
        self, running: Running, token_ids: Sequence[int], sampling: inference_pb2.SamplingParameters
    ) -> inference_pb2.CaptureHandle | None:
        if running.spec.capture is None:
            return None
        keeper = require_keeper(self._keeper)
        facts = self._engine.facts
        description = capture_pb2.CaptureDescription(
            capture_id=running.request_id,
            model=facts.name,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            dtype=facts.dtype,
            spec=running.spec.capture,
            steering=running.spec.steering,
            prompt_token_ids=token_ids,
            num_sequences=num_sequences(sampling),
            layout=capture_pb2.ParallelLayout(
                tensor_parallel_size=facts.tensor_parallel_size, pipeline_parallel_size=facts.pipeline_parallel_size
            ),
            vllm_version=facts.vllm_version,
        )
        description.request_time.GetCurrentTime()
        try:
            await keeper.open(description)
        except (asyncio.CancelledError, NoAnswerError):
            # The store may have opened the capture: nobody else would ever end it.
            self._registry.end(running)
            unheard = [capture_pb2.SequenceOutcome(finish_reason="abort")] * num_sequences(sampling)
            keeper.seal(_aborted(running.request_id, unheard))
            raise
        return inference_pb2.CaptureHandle(capture_id=running.request_id, store_endpoint=keeper.advertised)

    @asynccontextmanager
    async def _sealed(self, run: _Run) -> AsyncIterator[None]:
        """Seal the run's capture however the run ends."""
        seal = _aborted(run.running.request_id, [])
        try:
            yield
        except Exception as error:
            if not (isinstance(error, Failure) and error.reason == Reason.ERROR_REASON_ABORTED):
                _blame(seal, error)
            raise
        finally:
            # Cancellation (the client dropped the stream) comes here as well: ABORTED, unless all was generated.
            if run.has_generated:
                seal.outcome = capture_pb2.CAPTURE_STATE_COMPLETE
            if run.handle is not None:
                seal.sequences.extend(run.outcomes(default="abort"))
                require_keeper(self._keeper).seal(seal)


class _Run:
    """The generation itself, of one or more sequences."""

    def __init__(
        self,
        engine: Engine,
        running: Running,
        token_ids: Sequence[int],
        sampling: inference_pb2.SamplingParameters,
        rows: dict[bytes, int],
        handle: inference_pb2.CaptureHandle | None,
    ) -> None:
        self._engine = engine
        self.running = running
        self._token_ids = token_ids
        self._sampling = sampling
        self._rows = rows
        self.handle = handle
        self.has_generated = False
        """Whether every sequence has ended by itself."""
        self._sequences = [_Sequence() for _ in range(num_sequences(sampling))]
        self._queue: asyncio.Queue[tuple[int, Delta] | _Ended] = asyncio.Queue()

    def outcomes(self, default: str) -> list[capture_pb2.SequenceOutcome]:
        """Return how the sequences ended; `default` is the finish reason of those that have not."""
        return [
            capture_pb2.SequenceOutcome(generated_token_ids=item.token_ids, finish_reason=item.finish_reason or default)
            for item in self._sequences
        ]

    async def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yield the events of the generation, in the order that the contract gives."""
        yield inference_pb2.GenerateResponse(
            started=inference_pb2.GenerationStarted(
                request_id=self.running.request_id, prompt_token_ids=self._token_ids, capture=self.handle
            )
        )
        async with self._generating():
            open_sequences = len(self._sequences)
            while open_sequences:
                item = await self._queue.get()
                if isinstance(item, _Ended):
                    if item.error is not None:
                        raise item.error
                    open_sequences -= 1
                else:
                    yield self._delta(*item)
        self.has_generated = True
        yield inference_pb2.GenerateResponse(finished=self._finished())

    @asynccontextmanager
    async def _generating(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._generate(index)) for index in range(len(self._sequences))]
        tasks.append(asyncio.create_task(self._watch_abort()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()  # closes the engine's generators, which stops their requests
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, index: int) -> None:
        try:
            stream = self._engine.generate(
                f"{self.running.request_id}#{index}",
                self._token_ids,
                sampling_params(self._sampling, index),
                make_plan(self.running, index, len(self._token_ids), self._rows),
                self.running.spec.cache_salt(len(self._token_ids)),
            )
            async for delta in stream:
                self._queue.put_nowait((index, delta))
        except Exception as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._queue.put_nowait(_Ended(error))
        else:
            self._queue.put_nowait(_Ended())

    async def _watch_abort(self) -> None:
        await self.running.aborted.wait()
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


def require_keeper(keeper: CaptureKeeper | None) -> CaptureKeeper:
    """Return the keeper of captures.

    Raises:
        Failure: The service was started without a store.
    """
    if keeper is None:
        raise Failure(
            Reason.ERROR_REASON_STORE_UNREACHABLE,
            "This server was started without a store and captures nothing; start it with --store HOST:PORT.",
            endpoint="",
        )
    return keeper


def _aborted(capture_id: str, sequences: Sequence[capture_pb2.SequenceOutcome]) -> store_pb2.SealCaptureRequest:
    return store_pb2.SealCaptureRequest(
        capture_id=capture_id, sequences=sequences, outcome=capture_pb2.CAPTURE_STATE_ABORTED
    )


def _blame(seal: store_pb2.SealCaptureRequest, error: Exception) -> None:
    died = isinstance(error, Failure) and error.reason == Reason.ERROR_REASON_ENGINE_DEAD
    seal.outcome = capture_pb2.CAPTURE_STATE_INCOMPLETE
    seal.incomplete_reason = (
        capture_pb2.INCOMPLETE_REASON_ENGINE_DIED if died else capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED
    )
    # Another text than that of our own failures is for the log: it may hold anything.
    seal.incomplete_detail = error.message if isinstance(error, Failure) else "The engine failed; see its log."


def _aborted_failure(running: Running) -> Failure:
    return Failure(
        Reason.ERROR_REASON_ABORTED, f"The request {running.request_id!r} was aborted.", request_id=running.request_id
    )


async def _unless_aborted(running: Running, work: Coroutine[object, object, _T]) -> _T:
    """Return what `work` returns, or stop it.

    Raises:
        Failure: Somebody called Abort meanwhile.
    """
    working, aborted = asyncio.create_task(work), asyncio.create_task(running.aborted.wait())
    try:
        await asyncio.wait({working, aborted}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _aborted_failure(running)
    finally:
        for task in (working, aborted):
            task.cancel()
        await asyncio.gather(working, aborted, return_exceptions=True)
