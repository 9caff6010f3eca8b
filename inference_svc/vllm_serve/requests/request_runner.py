"""Runs the requests of an API server that are captured, steered or watched, until their captures are sealed.

`session/request_runner.py` does the same for the gRPC service, with the same parts.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.engine.engine import tokenizer_of
from inference_svc.engine.streams import engine_dead_failure
from inference_svc.requests.plans import count_spare_positions, make_plan
from inference_svc.requests.replies import ReplyReader
from inference_svc.requests.tokenizer_thread import TokenizerThread
from inference_svc.session.burst import Burst
from inference_svc.session.capture_session import CaptureSession
from inference_svc.session.existing_capture import Stops, kept_sequences
from inference_svc.session.scores.rules import sequence_rules
from inference_svc.session.scores.scoring import scoring
from inference_svc.session.steering_changes import SteeringChanges
from inference_svc.vllm_serve.requests.outputs import CallerOutputs, digest_of, kept_outputs, merge_streams
from inference_svc.vllm_serve.requests.refusals import as_http_errors
from inference_svc.vllm_serve.requests.scored_streams import record, record_kept, scored_stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from inference_svc.engine.engine import Engine
    from inference_svc.metrics import RuleCounts
    from inference_svc.requests.registry import RequestRegistry, Running
    from inference_svc.session.reservation import Reservations
    from inference_svc.session.scores.rules import SequenceRules
    from inference_svc.session.scores.scoring import SequenceScores
    from inference_svc.vllm_serve.delivery import Delivery
    from inference_svc.vllm_serve.requests.request_admission import AdmittedRequest
    from inference_svc.vllm_serve.shared_vectors import RequestVectors

    Generate = Callable[..., AsyncGenerator[Any]]

_NO_CHAT = (
    "vLLM's API server made the prompt's tokens, and does not tell residuum where its messages are. The inference "
    "service keeps the positions of messages."
)


class RequestRunner:
    """Runs admitted requests: reserves resources, opens the capture, generates, and seals."""

    def __init__(
        self,
        llm: Any,
        generate: Generate,
        engine: Engine,
        registry: RequestRegistry,
        reservations: Reservations,
        vectors: RequestVectors,
        delivery: Delivery | None,
        rule_counts: RuleCounts,
        wait_for_startup: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare to run requests.

        Args:
            llm: The AsyncLLM.
            generate: The AsyncLLM's original `generate`.
            engine: The engine.
            registry: The requests that run.
            reservations: Reserves what requests need in the workers.
            vectors: Keeps the vectors that come with requests.
            delivery: Where captures go; None: nothing is captured.
            rule_counts: Counts the rules that fire.
            wait_for_startup: Waits until the server can capture and steer. Raises a Failure if its start failed.
        """
        self._llm = llm
        self._generate = generate
        self._engine = engine
        self._registry = registry
        self._reservations = reservations
        self._vectors = vectors
        self._delivery = delivery
        self._rule_counts = rule_counts
        self._wait_for_startup = wait_for_startup
        self._burst = Burst()
        self._replies: ReplyReader | None = None

    async def run(self, admitted: AdmittedRequest, options: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Run a request, and yield vLLM's outputs. `options` are further arguments of vLLM's `generate`.

        Raises:
            VLLMValidationError, GracefulHTTPError: The request exceeds a limit, or failed.
        """
        with as_http_errors():
            await self._wait_for_startup()
            await self._check_with_vllm(admitted, options)
            running = self._registry.start_inline(admitted.spec)
            received, sampling = admitted.received, admitted.received.sampling
            replies = await self._reader()
            session = CaptureSession(
                self._engine.facts,
                running,
                admitted.token_ids,
                sampling.n,
                self._require_delivery,
                self._cause_of,
                sampling_digest=partial(digest_of, sampling),
                max_generated_tokens=sampling.max_tokens or 0,
                new_texts=partial(replies.new_texts, admitted.token_ids) if running.spec.capture else lambda: None,
                describe_prompt=partial(replies.describe, admitted.token_ids, _NO_CHAT),
                wait_to_seal=partial(self._burst.wait_on, asyncio.get_running_loop()),
            )
            session.prompt_text = _kept_text(admitted)
            outputs = CallerOutputs(session.sequences, sampling.output_kind)
            prompt_tokens = len(admitted.token_ids)
            place = scoring(self._engine.scores, running.spec.shared, prompt_tokens, admitted.parameters)
            try:
                self._vectors.keep(received.arguments, admitted.spec)  # some may have been evicted since the check
                reservation = self._reservations.reserve(running)
                async with reservation as vectors, place as scores, session:
                    if session.existing is not None:
                        kept = await kept_sequences(
                            session.existing,
                            _stops(sampling, replies),
                            partial(replies.text, skip_special_tokens=sampling.skip_special_tokens),
                        )
                        record_kept(session.existing, admitted, kept)
                        for output in kept_outputs(received.request_id, admitted.token_ids, kept, sampling.output_kind):
                            yield output
                        return
                    changes = None
                    if running.spec.shared.may_change_steering:
                        changes = SteeringChanges(self._engine, running, prompt_tokens, vectors, session.sequences)
                        session.history = changes
                    rules = self._rules(running, admitted, changes, replies)
                    streams = [
                        scored_stream(
                            self._stream(running, admitted, index, vectors.rows, options, scores),
                            received.known_id,
                            sequence,
                            scores[index] if scores else None,
                            rules[index] if rules else None,
                        )
                        for index, sequence in enumerate(session.sequences)
                    ]
                    merged = merge_streams(running, streams, self._burst, session.opened, reads_ahead=bool(rules))
                    async with changes or nullcontext(), aclosing(merged) as steps:
                        async for index, (step, delta) in steps:
                            if delta is not None:
                                record(session, admitted, index, delta)
                            output = outputs.add(index, step)
                            if output is not None:
                                yield output
            finally:
                self._registry.finish(running, has_begun=session.has_begun)

    async def _check_with_vllm(self, admitted: AdmittedRequest, options: Mapping[str, Any]) -> None:
        """Let vLLM check a request that captures as `generate` does, but before its capture is opened.

        Otherwise a refused request would use up its ID, or replace a capture by an empty one.

        Raises:
            VLLMValidationError: vLLM refuses the request.
        """
        if admitted.spec.capture is None:
            return
        received, tasks = admitted.received, await self._llm.get_supported_tasks()
        self._llm.input_processor.process_inputs(
            received.request_id,
            received.prompt,
            _own_copy(received.sampling),
            tasks,
            lora_request=options.get("lora_request"),
        )

    def _rules(
        self, running: Running, admitted: AdmittedRequest, changes: SteeringChanges | None, replies: ReplyReader
    ) -> list[SequenceRules]:
        """Return the rules of each sequence; an empty list without rules."""
        sampling = admitted.received.sampling
        text_of = partial(replies.text, admitted.token_ids, skip_special_tokens=sampling.skip_special_tokens)
        return sequence_rules(
            running.spec,
            sampling.n,
            changes,
            text_of if sampling.detokenize else _no_text,
            self._rule_counts,
            has_stop_strings=bool(sampling.stop),
        )

    def _stream(
        self,
        running: Running,
        admitted: AdmittedRequest,
        index: int,
        rows: dict[bytes, int],
        options: Mapping[str, Any],
        scores: Sequence[SequenceScores],
    ) -> AsyncGenerator[Any]:
        """Generate one sequence."""
        received = admitted.received
        sampling, prompt_tokens = _own_copy(received.sampling), len(admitted.token_ids)
        spare_positions = count_spare_positions(admitted.parameters, running.spec.probes)
        region = scores[index].region if scores else None
        plan = make_plan(running, index, prompt_tokens, rows, spare_positions, region)
        sampling.extra_args = {**(sampling.extra_args or {}), **(plan.to_extra_args() if plan else {})}
        if plan is not None and plan.needs_whole_prompt:
            # Positions that are read from the prefix cache have no rows to capture.
            sampling.skip_reading_prefix_cache = True
        if sampling.n > 1 and sampling.seed is not None:
            sampling.seed += index  # the same seeds as vLLM's own n > 1
        sampling.n = 1
        sampling.output_kind = RequestOutputKind.DELTA
        prompt, salt = received.prompt, running.cache_salt(prompt_tokens)
        if salt:
            prompt = {**prompt, "cache_salt": f"{prompt.get('cache_salt') or ''}/{salt}"}
        return self._generate(prompt, sampling, received.request_id, **options)

    async def _reader(self) -> ReplyReader:
        """Return the reader that decodes tokens."""
        if self._replies is None:
            self._replies = ReplyReader(TokenizerThread(await tokenizer_of(self._llm)))
        return self._replies

    def _require_delivery(self) -> Delivery:
        assert self._delivery is not None  # noqa: S101 - `RequestAdmission` refuses captures without a store
        return self._delivery

    def _cause_of(self, error: Exception) -> Exception:
        """Return the failure that an exception of vLLM's means, or the exception itself."""
        if isinstance(error, EngineDeadError) or self._engine.is_dead:
            return engine_dead_failure()
        return error


def _own_copy(sampling: Any) -> Any:
    """Return a copy of sampling parameters that vLLM may change.

    It is a shallow one: vLLM makes a deep one, but only after it has changed the structured outputs. The capture's
    digest of the sampling may be made later.
    """
    own = copy(sampling)
    own.structured_outputs = copy(own.structured_outputs)
    return own


def _stops(sampling: Any, replies: ReplyReader) -> Stops:
    """Return what vLLM stops at, from its sampling parameters."""
    eos_token_id = None if sampling.ignore_eos else replies.eos_token_id
    shown = sampling.include_stop_str_in_output
    return Stops(sampling.stop or (), sampling.stop_token_ids or (), eos_token_id, shown, sampling.min_tokens)


async def _no_text(_token_ids: Sequence[int]) -> str:
    """Return the text of a reply whose caller asked for token IDs alone."""
    return ""


def _kept_text(admitted: AdmittedRequest) -> str:
    """Return the text of a prompt whose capture keeps it. vLLM's endpoints pass it on with the tokens."""
    capture = admitted.spec.capture
    return str(admitted.received.prompt["prompt"]) if capture is not None and capture.keep_prompt else ""
