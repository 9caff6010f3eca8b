"""The front end inside vLLM's API server. It does for `vllm serve` what the process of the inference service does.

A request without residuum's arguments passes unchanged. Any other request is checked before vLLM's endpoint begins its
answer, so that an invalid request gets status 400. The front end opens its capture before vLLM sees the request, and
seals the capture no matter how the request ends.
"""

from __future__ import annotations

import re
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.admission.fields import invalid
from inference_svc.admission.operator_rules import OperatorRules, RulesFileError, load_rules
from inference_svc.admission.probes import probe_sites
from inference_svc.engine.engine import Engine, tokenizer_of
from inference_svc.engine.facts import facts_of
from inference_svc.engine.streams import Delta, engine_dead_failure
from inference_svc.metrics import InferenceMetrics
from inference_svc.request_parts import RequestParts, Share
from inference_svc.requests.plans import count_spare_positions, make_plan
from inference_svc.requests.prompts import no_prompt_text
from inference_svc.requests.registry import RequestRegistry
from inference_svc.requests.replies import ReplyReader
from inference_svc.requests.tokenizer_thread import TokenizerThread
from inference_svc.resources.score_board import ScoreBoard
from inference_svc.session.capture_session import CaptureSession
from inference_svc.session.existing_capture import kept_sequences
from inference_svc.session.kept_scores import kept_scores_of
from inference_svc.session.rules import sequence_rules
from inference_svc.session.scoring import scoring
from inference_svc.session.steering_changes import SteeringChanges
from inference_svc.taps.scores import open_board
from inference_svc.vllm_serve.delivery import Delivery
from inference_svc.vllm_serve.outputs import CallerOutputs, digest_of, kept_outputs, merge_streams
from inference_svc.vllm_serve.refusals import as_http_errors
from inference_svc.vllm_serve.score_fields import Answer, current_answer
from inference_svc.vllm_serve.scored_streams import scored_stream
from inference_svc.vllm_serve.shared_vectors import SharedVectors
from inference_svc.vllm_serve.startup import Startup, UntappedLLM, folder_of
from inference_svc.vllm_serve.xargs import (
    ResiduumArguments,
    check_argument_names,
    has_residuum_arguments,
    read_residuum_arguments,
    without_residuum_arguments,
)
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from residuum.wire.ids import is_valid_id, make_id
from residuum.wire.limits import MAX_ID_LENGTH, MAX_SEQUENCES
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from inference_svc.admission.specs import ResolvedSpec
    from inference_svc.model_facts import ModelFacts
    from inference_svc.requests.registry import Running
    from inference_svc.session.existing_capture import KeptSequence
    from inference_svc.session.rules import SequenceRules
    from inference_svc.session.scoring import SequenceScores
    from inference_svc.tap_settings import TapSettings
    from residuum.v1 import capture_pb2

    Generate = Callable[..., AsyncGenerator[Any]]


_log = get_logger(__name__)

_FIRST_PROMPT = re.compile("(cmpl-.+)-0", re.DOTALL)
"""The ID that vLLM gives the first prompt of a completion: the answer's `id`, and the prompt's number."""


_ANY_PROMPT = re.compile("cmpl-.+-([0-9]+)", re.DOTALL)
"""The ID that vLLM gives a prompt of a completion."""


_NO_CHAT = (
    "vLLM's API server made the prompt's tokens, and does not tell residuum where its messages are. The inference "
    "service keeps the positions of messages."
)


@dataclass(frozen=True)
class _Admitted:
    """A valid request."""

    spec: ResolvedSpec
    """The resolved spec. Its request ID is that of the capture."""
    asked: ResiduumArguments
    prompt: Any
    """The prompt in vLLM's form."""
    token_ids: list[int]
    sampling: Any
    """vLLM's sampling parameters, without residuum's arguments."""
    parameters: inference_pb2.SamplingParameters
    """The part of the sampling parameters that plans and checks need."""
    request_id: str
    """The ID that vLLM gave the request."""
    answer: Answer | None
    """Where the scores go; None if the server runs without the middleware."""


class _Serving(NamedTuple):
    """What serves requests. It depends on the workers' descriptions, which arrive shortly after the start."""

    engine: Engine
    parts: RequestParts


class FrontEnd:
    """Captures and steers the requests of one API server."""

    def __init__(self, settings: TapSettings, llm: Any, generate: Generate, index: int, count: int) -> None:
        """Prepare to serve requests. `Startup` does the rest, on the event loop.

        Args:
            settings: The settings.
            llm: The AsyncLLM.
            generate: The AsyncLLM's original `generate`.
            index: The index of this API server.
            count: The number of API servers.
        """
        self._generate = generate
        self._llm = llm
        self._settings = settings
        self._replies: ReplyReader | None = None
        self._share = Share(index, count)
        self._shared: SharedVectors | None = None
        self._has_rules = settings.rules_file is not None
        self._metrics = InferenceMetrics()  # which vLLM's server does not show
        self._registry = RequestRegistry(time_to_live=0.0, max_registrations=0)
        self._described: _Serving | None = None
        self._delivery = Delivery(settings) if settings.store else None
        self._startup = Startup(llm, settings, self._delivery, self._serve, is_first=index == 0)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, options: Mapping[str, Any]
    ) -> AsyncGenerator[Any]:
        """Generate like vLLM, and capture and steer as the request's `vllm_xargs` ask.

        Raises:
            VLLMValidationError: The arguments are invalid. Raised by the call, before the endpoint begins its answer;
                or by the answer, if the workers have not described themselves yet.
            GracefulHTTPError: This server cannot capture or steer. The text says why.
        """
        extra_args = sampling_params.extra_args
        with as_http_errors():
            check_argument_names(extra_args)
        if not has_residuum_arguments(extra_args) and not self._has_rules:
            return self._generate(prompt, sampling_params, request_id, **options)
        sampling = sampling_params.clone()
        sampling.extra_args = without_residuum_arguments(extra_args)
        with as_http_errors():
            asked = read_residuum_arguments(extra_args or {})
            if asked is None and not self._has_rules:
                return self._generate(prompt, sampling, request_id, **options)
            asked = asked or ResiduumArguments(inference_pb2.RequestSpec(), ())
            self._startup.check()
            adapter = getattr(options.get("lora_request"), "lora_name", "")
            answer = current_answer()
            if answer is not None:
                answer.has_scores |= self._has_rules or bool(asked.spec.probes.probes)
            admit = partial(self._admit, asked, prompt, sampling, request_id, adapter, answer)
            if self._described is None:
                return self._run_later(admit, options)
            return self._run(admit(), options)

    def seal_captures(self) -> None:
        """Seal all captures. Called before the engine stops."""
        if self._delivery is not None:
            self._delivery.close_stores()

    def close(self) -> None:
        """Let the shippers send their rows, and clean up. Called after the engine has stopped."""
        if self._delivery is not None:
            self._delivery.close()
        self._startup.clean_up()

    def _serve(self, ranks: Sequence[dict[str, Any]]) -> Engine:
        """Begin to check requests, and return the engine. `ranks` are the workers' descriptions."""
        config = self._llm.vllm_config
        served = config.model_config.served_model_name
        name = served if isinstance(served, str) else config.model_config.model
        facts, board = facts_of(config, self._settings, name, ranks), None
        if path := next((rank["score_board"] for rank in ranks if rank["score_board"]), ""):
            board = ScoreBoard(open_board(path), share=(self._share.index, self._share.count))
            facts = replace(facts, probe_sites=probe_sites(facts.sites))
        engine = Engine(UntappedLLM(self._llm, self._generate), None, facts, scores=board)
        how_to_send = "Send them in vllm_xargs.residuum_vectors."
        rules = self._operator_rules(facts)
        parts = RequestParts.assemble(engine, self._registry, self._settings, how_to_send, self._share, rules)
        if self._share.count > 1:
            folder = folder_of(ranks) / "vectors"
            limits = self._settings.max_vectors, self._settings.max_vector_mib << 20
            self._shared = SharedVectors(folder, *limits)
        self._described = _Serving(engine, parts)
        return engine

    def _operator_rules(self, facts: ModelFacts) -> OperatorRules:
        """Return the rules of the operator's file.

        Raises:
            Failure: The file cannot be used. Every request then fails, because none would be watched.
        """
        if self._settings.rules_file is None:
            return OperatorRules()
        try:
            return load_rules(self._settings.rules_file, facts)
        except RulesFileError as error:
            _log.error("the operator's rules cannot be used", error=str(error))
            raise Failure(
                Reason.ERROR_REASON_INTERNAL,
                "The server's rules (RESIDUUM_RULES_FILE) cannot be used; its log says why. Tell its operator.",
            ) from None

    @property
    def _serving(self) -> _Serving:
        assert self._described is not None  # noqa: S101 - requests wait until it is
        return self._described

    # ---------------------------------------------------------------------------------------- the checks of a request

    def _admit(
        self,
        asked: ResiduumArguments,
        prompt: Any,
        sampling: Any,
        request_id: str,
        adapter: str,
        answer: Answer | None,
    ) -> _Admitted:
        """Check a request in full.

        Raises:
            Failure: The request is invalid, or the server cannot capture or steer.
        """
        spec = self._serving.parts.admission.resolve(_checked_model(asked.spec, adapter))
        # With rules of the operator, a request may have nothing of its own.
        if spec.capture is None and spec.steering is None and spec.probes is None and not self._has_rules:
            raise invalid(
                "vllm_xargs.residuum", "The spec has no capture, steering or probes. Set one, or leave it out."
            )
        if spec.steering is not None and spec.steering.updatable:
            raise invalid(
                "steering.updatable",
                "The OpenAI API cannot change the steering of a running request; unset updatable.",
            )
        if spec.capture is not None and self._delivery is None:
            raise invalid(
                "capture", "This server has no store, so it cannot capture. Its operator can set RESIDUUM_STORE."
            )
        token_ids = _token_ids(prompt)
        if spec.capture is not None and spec.capture.keep_prompt and not prompt.get("prompt"):
            raise no_prompt_text()
        parameters = self._parameters(sampling, len(token_ids))
        self._keep(asked, spec)
        self._serving.parts.admission.check_request(spec, "", len(token_ids), parameters)
        spec = replace(spec, request_id=_capture_id(spec, request_id), adapter=adapter)
        return _Admitted(spec, asked, prompt, token_ids, sampling, parameters, request_id, answer)

    def _parameters(self, sampling: Any, prompt_tokens: int) -> inference_pb2.SamplingParameters:
        if not 1 <= sampling.n <= MAX_SEQUENCES:
            raise invalid(
                "n", f"n must be from 1 to {MAX_SEQUENCES} for a request that is captured, steered or watched by rules."
            )
        room = max(self._serving.engine.facts.max_model_len - prompt_tokens, 1)
        return inference_pb2.SamplingParameters(
            max_tokens=min(sampling.max_tokens or room, room),
            num_sequences=sampling.n,
            stop=sampling.stop or (),
            # Only whether they are asked for counts here. vLLM reads the numbers from its own parameters.
            logprobs=None if sampling.logprobs is None else 0,
            prompt_logprobs=None if sampling.prompt_logprobs is None else 0,
        )

    def _keep(self, asked: ResiduumArguments, spec: ResolvedSpec) -> None:
        """Keep the vectors that came with a request, and those that it names and another API server has."""
        vectors = self._serving.parts.vectors
        for vector in asked.vectors:
            vectors.put(vector)
        if self._shared is not None:
            with suppress(OSError):  # the disk is full: then other API servers ask callers for these vectors
                for vector in asked.vectors:
                    self._shared.put(vector)
            for vector in self._shared.find(vectors.missing(spec.digests)):
                vectors.put(vector)

    # ---------------------------------------------------------------------------------------- the life of a request

    async def _run_later(self, admit: Callable[[], _Admitted], options: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Wait until the server has started, then check the request and run it."""
        with as_http_errors():
            await self._startup.wait()
            admitted = admit()
        async with aclosing(self._run(admitted, options)) as outputs:
            async for output in outputs:
                yield output

    async def _run(self, admitted: _Admitted, options: Mapping[str, Any]) -> AsyncGenerator[Any]:
        with as_http_errors():
            await self._startup.wait()
            running = self._registry.start_inline(admitted.spec)
            sampling, replies = admitted.sampling, await self._reader()
            session = CaptureSession(
                self._serving.engine.facts,
                running,
                admitted.token_ids,
                sampling.n,
                self._require_delivery,
                self._cause_of,
                sampling_digest=digest_of(sampling) if running.spec.capture else b"",
                max_generated_tokens=sampling.max_tokens or 0,
                new_texts=partial(replies.new_texts, admitted.token_ids) if running.spec.capture else lambda: None,
                describe_prompt=partial(replies.describe, admitted.token_ids, _NO_CHAT),
            )
            session.prompt_text = _kept_text(admitted)
            outputs = CallerOutputs(session.sequences, sampling.output_kind)
            engine, prompt_tokens = self._serving.engine, len(admitted.token_ids)
            place = scoring(engine.scores, running.spec.probes, prompt_tokens, admitted.parameters)
            try:
                self._keep(admitted.asked, admitted.spec)  # the cache may have evicted them since the check
                reservation = self._serving.parts.reservations.reserve(running)
                async with reservation as vectors, place as scores, session:
                    if session.existing is not None:
                        kept = await kept_sequences(
                            session.existing,
                            sampling.stop or (),
                            sampling.stop_token_ids or (),
                            partial(replies.text, skip_special_tokens=sampling.skip_special_tokens),
                        )
                        _record_kept(session.existing, admitted, kept)
                        for output in kept_outputs(admitted.request_id, admitted.token_ids, kept, sampling.output_kind):
                            yield output
                        return
                    changes = None
                    if running.spec.may_change_steering:
                        changes = SteeringChanges(engine, running, prompt_tokens, vectors, session.sequences)
                        session.history = changes
                    rules = self._rules(running, admitted, changes, replies)
                    streams = [
                        scored_stream(
                            self._stream(running, admitted, index, vectors.rows, options, scores),
                            sequence,
                            scores[index] if scores else None,
                            rules[index] if rules else None,
                        )
                        for index, sequence in enumerate(session.sequences)
                    ]
                    merged = merge_streams(streams, session.opened, reads_ahead=bool(rules))
                    async with changes or nullcontext(), aclosing(merged) as steps:
                        async for index, (step, delta) in steps:
                            if delta is not None:
                                _record(session, admitted, index, delta)
                            output = outputs.add(index, step)
                            if output is not None:
                                yield output
            finally:
                self._registry.finish(running, has_begun=session.has_begun)

    def _rules(
        self, running: Running, admitted: _Admitted, changes: SteeringChanges | None, replies: ReplyReader
    ) -> list[SequenceRules]:
        """Return the rules of each sequence; an empty list without rules."""
        sampling = admitted.sampling
        text_of = partial(replies.text, admitted.token_ids, skip_special_tokens=sampling.skip_special_tokens)
        return sequence_rules(
            running.spec,
            sampling.n,
            changes,
            text_of if sampling.detokenize else _no_text,
            self._metrics,
            has_stop_texts=bool(sampling.stop),
        )

    def _stream(
        self,
        running: Running,
        admitted: _Admitted,
        index: int,
        rows: dict[bytes, int],
        options: Mapping[str, Any],
        scores: Sequence[SequenceScores],
    ) -> AsyncGenerator[Any]:
        """Generate one sequence."""
        sampling = admitted.sampling.clone()
        prompt_tokens = len(admitted.token_ids)
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
        prompt, salt = admitted.prompt, running.cache_salt(prompt_tokens)
        if salt:
            prompt = {**prompt, "cache_salt": f"{prompt.get('cache_salt') or ''}/{salt}"}
        return self._generate(prompt, sampling, admitted.request_id, **options)

    async def _reader(self) -> ReplyReader:
        """Return the reader that decodes tokens."""
        if self._replies is None:
            self._replies = ReplyReader(TokenizerThread(await tokenizer_of(self._llm)))
        return self._replies

    def _require_delivery(self) -> Delivery:
        assert self._delivery is not None  # noqa: S101 - `_admit` refuses captures without a store
        return self._delivery

    def _cause_of(self, error: Exception) -> Exception:
        """Return the failure that an exception of vLLM's means, or the exception itself."""
        if isinstance(error, EngineDeadError) or self._serving.engine.is_dead:
            return engine_dead_failure()
        return error


def _checked_model(spec: inference_pb2.RequestSpec, adapter: str) -> inference_pb2.RequestSpec:
    """Return a spec without the `model` that it expects, if the request uses the LoRA adapter of that name.

    Raises:
        Failure: The request uses an adapter, and the spec expects another model.
    """
    if not adapter or not spec.model:
        return spec
    if spec.model != adapter:
        shown = spec.model[:MAX_ID_LENGTH]
        raise Failure(
            Reason.ERROR_REASON_UNKNOWN_MODEL,
            f"The request's model is the LoRA adapter {adapter}, but vllm_xargs.residuum expects {shown}. Leave model "
            "out of vllm_xargs.residuum.",
            model=shown,
            serving=adapter,
        )
    checked = inference_pb2.RequestSpec()
    checked.CopyFrom(spec)
    checked.ClearField("model")
    return checked


async def _no_text(_token_ids: Sequence[int]) -> str:
    """Return the text of a reply whose caller asked for token IDs alone."""
    return ""


def _record(session: CaptureSession, admitted: _Admitted, index: int, delta: Delta) -> None:
    """Add the scores and events of an output to the capture and to the answer."""
    session.sequences[index].rule_events += delta.rule_events
    if session.scores is not None:
        session.scores.add(index, delta)
    if admitted.answer is not None and admitted.spec.probes is not None:
        names = [probe.name for probe in admitted.spec.shown_probes]
        admitted.answer.add(_choice(admitted, index), names, delta)


def _record_kept(manifest: capture_pb2.CaptureManifest, admitted: _Admitted, sequences: Sequence[KeptSequence]) -> None:
    """Add the scores and events of a capture that exists already to the answer."""
    if admitted.answer is None or admitted.spec.probes is None:
        return
    probes = admitted.spec.shown_probes
    for index, item in enumerate(sequences):
        prompt = kept_scores_of(probes, manifest.prompt_scores.probes) if index == 0 else ()
        scores = kept_scores_of(probes, item.scores)
        delta = Delta("", item.token_ids, scores=scores, prompt_scores=prompt, rule_events=item.rule_events)
        admitted.answer.add(_choice(admitted, index), [probe.name for probe in probes], delta)


def _choice(admitted: _Admitted, index: int) -> int:
    """Return the index of a sequence among the choices of an answer, which has those of all prompts of a completion."""
    completion = _ANY_PROMPT.fullmatch(admitted.request_id)
    return (int(completion[1]) if completion else 0) * int(admitted.sampling.n) + index


def _kept_text(admitted: _Admitted) -> str:
    """Return the text of a prompt whose capture keeps it. vLLM's endpoints pass it on with the tokens."""
    capture = admitted.spec.capture
    return str(admitted.prompt["prompt"]) if capture is not None and capture.keep_prompt else ""


def _token_ids(prompt: Any) -> list[int]:
    """Return the token IDs of a prompt in the form that vLLM's endpoints use.

    Raises:
        Failure: The prompt has something other than tokens.
    """
    is_tokens = isinstance(prompt, dict) and prompt.get("type", "token") == "token" and prompt.get("prompt_token_ids")
    if not is_tokens or prompt.get("multi_modal_data"):
        raise invalid(
            "prompt",
            "Only prompts of text or token IDs can be captured, steered and watched by rules. This one has other "
            "parts, such as images.",
        )
    return list(prompt["prompt_token_ids"])


def _capture_id(spec: ResolvedSpec, request_id: str) -> str:
    """Return the ID of the request's capture: the caller's choice, otherwise the `id` of the answer.

    vLLM appends the number of the prompt to the `id` of a completion. Callers do not see that for a single prompt, so
    the capture of the first prompt is named as the answer.

    Raises:
        Failure: The `id` of the answer is not a valid capture ID.
    """
    if spec.request_id:
        return spec.request_id
    if spec.capture is None:
        return make_id()  # not vLLM's ID: the registry refuses running IDs, and a caller may repeat X-Request-Id
    completion = _FIRST_PROMPT.fullmatch(request_id)
    answer_id = completion[1] if completion else request_id
    if is_valid_id(answer_id):
        return answer_id
    raise invalid(
        "request_id",
        f"{answer_id[:128]!r}, made from the X-Request-Id, is not a valid capture ID: 1 to 128 characters of a-z A-Z "
        "0-9 . _ -, not starting with . or -. Choose another X-Request-Id, or set request_id in the spec.",
    )
