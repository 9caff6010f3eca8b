"""Runs the requests of the gRPC service, from the first check to the seal of the capture."""

from __future__ import annotations

from contextlib import aclosing, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from inference_svc.admission.sampling import max_new_tokens, num_sequences, sampling_digest
from inference_svc.captures.stores import require_stores
from inference_svc.metrics import InferenceMetrics
from inference_svc.requests.concurrency import Places
from inference_svc.requests.replies import NO_CHAT
from inference_svc.session.burst import Burst
from inference_svc.session.capture_session import CaptureSession
from inference_svc.session.existing_capture import Stops, kept_sequences, replay
from inference_svc.session.generation import Generation
from inference_svc.session.scores.rules import sequence_rules
from inference_svc.session.scores.scoring import scoring
from inference_svc.session.steering_changes import SteeringChanges
from residuum.rpc import tracing
from residuum.rpc.errors import Failure, Reason
from svc_common.logs import bind_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from inference_svc.admission.admission import Admission
    from inference_svc.captures.stores import Stores
    from inference_svc.engine.engine import Engine
    from inference_svc.requests.registry import RequestRegistry, Running
    from inference_svc.resources.vector_activator import VectorHold
    from inference_svc.session.reservation import Reservations
    from inference_svc.session.scores.scoring import SequenceScores
    from residuum.v1 import capture_pb2, inference_pb2, steering_pb2


class RequestRunner:
    """Runs requests: checks them, reserves resources, opens the capture, generates, and seals."""

    def __init__(
        self,
        engine: Engine,
        registry: RequestRegistry,
        admission: Admission,
        reservations: Reservations,
        stores: Stores | None,
        metrics: InferenceMetrics | None = None,
        places: Places | None = None,
    ) -> None:
        """Prepare to run requests.

        Args:
            engine: The engine.
            registry: The requests that the service knows.
            admission: The checks of requests.
            reservations: Reserves what requests need in the workers.
            stores: Where captures go; None: nothing is captured.
            metrics: Where requests are counted.
            places: Limits the concurrent requests.
        """
        self._engine = engine
        self._registry = registry
        self._admission = admission
        self._reservations = reservations
        self._stores = stores
        self._metrics = metrics or InferenceMetrics()
        self._places = places or Places()
        self._burst = Burst()
        self._changes: dict[str, SteeringChanges] = {}
        """The steering changes of each updatable request that generates, by its path."""

    async def run(
        self, request: inference_pb2.GenerateRequest, tenant: str = ""
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Run a request of a tenant, and yield the events of `InferenceService.Generate`.

        Raises:
            Failure: The request is invalid, exceeds a limit, failed, or was aborted.
        """
        with self._metrics.request() as watch, self._places.taken(tenant):
            self._admission.check_sampling(request.sampling)
            # Read the prompt before the registration is used up, so that a bad prompt leaves the registration valid.
            token_ids = await self._engine.tokenize(request)
            self._admission.check_prompt(token_ids, request.sampling)
            running = self._start(request, tenant)
            bind_request(running.request_id)
            traced = tracing.is_on()
            if traced:
                tracing.set_attributes(request_id=running.request_id, prompt_tokens=len(token_ids))
                tracing.add_event("checked")
            session = self._session(running, request, token_ids)
            try:
                self._admission.check_request(running.spec, tenant, len(token_ids), request.sampling)
                if running.spec.capture is not None and running.spec.capture.keep_prompt:
                    session.prompt_text = await self._engine.prompts.text(request, token_ids)
                place = scoring(self._engine.scores, running.spec.shared, len(token_ids), request.sampling)
                async with self._reservations.reserve(running) as vectors, place as scores, session:
                    changes = self._changes_of(running, len(token_ids), vectors, session)
                    stream = await self._events(
                        running, request.sampling, token_ids, vectors, session, scores, changes, watch.add_tokens
                    )
                    async with changes or nullcontext(), aclosing(stream) as events:
                        if traced:
                            tracing.add_event("queued")  # the vectors are active, and rows may be sent
                        has_tokens = not traced
                        async for event in events:
                            if not watch.has_begun:
                                watch.begin(len(token_ids))
                            if not has_tokens and event.HasField("delta"):
                                tracing.add_event("first token")
                                has_tokens = True
                            yield event
                        if traced:
                            tracing.add_event("generated")
            finally:
                # A request that did not begin is released, so a retry is possible.
                self._changes.pop(running.path, None)
                self._registry.finish(running, has_begun=session.has_begun)

    async def update_steering(self, request_id: str, spec: steering_pb2.SteeringSpec, tenant: str = "") -> list[int]:
        """Change the steering of a tenant's running request; see `InferenceService.UpdateSteering`.

        Returns:
            For each sequence, the first position that the new steering applies to.

        Raises:
            Failure: The request cannot be changed, or the new steering is invalid.
        """
        running = self._registry.get_running(request_id, tenant)
        if running.spec.steering is None or not running.spec.steering.updatable:
            raise Failure(
                Reason.ERROR_REASON_NOT_UPDATABLE,
                f"The steering of the request {request_id!r} cannot be changed, because the request was not started as "
                "updatable. Start it with steering.updatable (in Python: updatable=True).",
                request_id=request_id,
            )
        steering = self._admission.resolve_steering(spec, tenant, running.spec)
        changes = self._changes.get(running.path)
        if changes is None:
            raise running.ended_failure()
        return await changes.change(steering)

    async def _events(
        self,
        running: Running,
        sampling: inference_pb2.SamplingParameters,
        token_ids: list[int],
        vectors: VectorHold,
        session: CaptureSession,
        scores: Sequence[SequenceScores],
        changes: SteeringChanges | None,
        count_sent: Callable[[int], None],
    ) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        """Return the events of a request whose capture may get rows, or exists already."""
        handle = self._handle(running)
        if session.existing is not None:
            return await self._replayed(session.existing, sampling, handle, count_sent)
        sequences = session.sequences
        rules = sequence_rules(
            running.spec,
            len(sequences),
            changes,
            partial(self._engine.replies.text, token_ids),
            self._metrics.rules,
            has_stop_strings=bool(sampling.stop),
        )
        return Generation(
            self._engine,
            running,
            token_ids,
            sampling,
            vectors,
            sequences,
            handle,
            count_sent,
            self._burst,
            scores,
            rules,
            session.scores,
            session.opened,
        ).events()

    def _changes_of(
        self, running: Running, prompt_tokens: int, vectors: VectorHold, session: CaptureSession
    ) -> SteeringChanges | None:
        """Return what changes the steering of the request; None if nothing may, or if the request does not generate."""
        if not running.spec.shared.may_change_steering or session.existing is not None:
            return None
        changes = SteeringChanges(self._engine, running, prompt_tokens, vectors, session.sequences)
        session.history = self._changes[running.path] = changes
        return changes

    def _session(
        self, running: Running, request: inference_pb2.GenerateRequest, token_ids: list[int]
    ) -> CaptureSession:
        replies, sampling = self._engine.replies, request.sampling
        chat = request.chat if request.WhichOneof("prompt") == "chat" else NO_CHAT
        return CaptureSession(
            self._engine.facts,
            running,
            token_ids,
            num_sequences(sampling),
            lambda: require_stores(self._stores),
            sampling_digest=partial(sampling_digest, sampling),
            max_generated_tokens=max_new_tokens(sampling),
            new_texts=partial(replies.new_texts, token_ids),
            describe_prompt=partial(replies.describe, token_ids, chat),
            wait_to_seal=self._burst.wait_after_end,
        )

    async def _replayed(
        self,
        existing: capture_pb2.CaptureManifest,
        sampling: inference_pb2.SamplingParameters,
        handle: inference_pb2.CaptureHandle | None,
        count_sent: Callable[[int], None],
    ) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        """Return the events of a request whose result is a capture that exists already."""
        replies = self._engine.replies
        eos_token_id = None if sampling.ignore_eos else replies.eos_token_id
        stops = Stops(sampling.stop, sampling.stop_token_ids, eos_token_id, min_tokens=sampling.min_tokens)
        kept = await kept_sequences(existing, stops, replies.text, replies.token_texts)
        return replay(existing, kept, handle, count_sent)

    def _handle(self, running: Running) -> inference_pb2.CaptureHandle | None:
        """Return the handle that tells clients where the capture is; None if the request captures nothing."""
        if running.spec.capture is None:
            return None
        return require_stores(self._stores).handle(running.request_id)

    def _start(self, request: inference_pb2.GenerateRequest, tenant: str) -> Running:
        if request.WhichOneof("target") == "request_id":
            return self._registry.start_registered(request.request_id, tenant)
        return self._registry.start_inline(self._admission.resolve(request.spec, tenant), tenant)
