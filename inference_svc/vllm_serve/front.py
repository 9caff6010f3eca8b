"""The front end inside vLLM's API server. It does for `vllm serve` what the process of the inference service does.

A request without residuum's arguments passes unchanged. Any other request is checked before vLLM's endpoint begins its
answer (`requests/request_admission`), so that an invalid request gets status 400. `requests/request_runner` opens its
capture, and seals it no matter how the request ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import REGISTRY

from inference_svc.admission.operator_rules import OperatorRules
from inference_svc.admission.probes import probe_sites
from inference_svc.admission.rules_file import RulesFile, RulesFileError
from inference_svc.engine.engine import Engine
from inference_svc.engine.facts import facts_of
from inference_svc.metrics import RuleCounts
from inference_svc.request_parts import RequestParts, Share
from inference_svc.requests.registry import RequestRegistry
from inference_svc.resources.score_board import ScoreBoard
from inference_svc.taps.scores import open_board
from inference_svc.vllm_serve.delivery import Delivery
from inference_svc.vllm_serve.requests.refusals import as_http_errors
from inference_svc.vllm_serve.requests.request_admission import ReceivedRequest, RequestAdmission
from inference_svc.vllm_serve.requests.request_runner import RequestRunner
from inference_svc.vllm_serve.requests.xargs import (
    ResiduumArguments,
    check_argument_names,
    has_residuum_arguments,
    read_residuum_arguments,
    without_residuum_arguments,
)
from inference_svc.vllm_serve.score_fields import current_answer
from inference_svc.vllm_serve.shared_vectors import RequestVectors, SharedVectors
from inference_svc.vllm_serve.startup import Startup, UntappedLLM, folder_of
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import inference_pb2
from svc_common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from inference_svc.model_facts import ModelFacts
    from inference_svc.tap_settings import TapSettings

    Generate = Callable[..., AsyncGenerator[Any]]

_log = get_logger(__name__)

_END_SECONDS = 5.0
_ABORT_SECONDS = 2.0
_POLL_SECONDS = 0.01


class _Serving(NamedTuple):
    """What serves requests. It depends on the workers' descriptions, which arrive shortly after the start."""

    admission: RequestAdmission
    runner: RequestRunner


class FrontEnd:
    """Captures and steers the requests of one API server."""

    def __init__(
        self, settings: TapSettings, rules: RulesFile | None, llm: Any, generate: Generate, index: int, count: int
    ) -> None:
        """Prepare to serve requests. `Startup` does the rest, on the event loop.

        Args:
            settings: The settings.
            rules: The operator's rules; None: there are none.
            llm: The AsyncLLM.
            generate: The AsyncLLM's original `generate`.
            index: The index of this API server.
            count: The number of API servers.
        """
        self._generate = generate
        self._llm = llm
        self._settings = settings
        self._share = Share(index, count)
        self._rules = rules
        self._has_rules = rules is not None
        self._registry = RequestRegistry(time_to_live=0.0, max_registrations=0)
        self._serving: _Serving | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the requests
        self.is_stopping = False
        """Whether the engine stops or has stopped."""
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
        sampling = copy(sampling_params)  # a shallow one, because only a field is replaced
        sampling.extra_args = without_residuum_arguments(extra_args)
        with as_http_errors():
            arguments = read_residuum_arguments(extra_args or {})
            if arguments is None and not self._has_rules:
                return self._generate(prompt, sampling, request_id, **options)
            arguments = arguments or ResiduumArguments(inference_pb2.RequestSpec(), ())
            self._startup.check()
            self._loop = asyncio.get_running_loop()
            adapter = getattr(options.get("lora_request"), "lora_name", "")
            answer = current_answer()
            if answer is not None:
                answer.has_scores |= self._has_rules or bool(arguments.spec.probes.probes)
            received = ReceivedRequest(arguments, prompt, sampling, request_id, adapter, answer)
            if self._serving is None:
                return self._run_later(received, options)
            return self._serving.runner.run(self._serving.admission.admit(received), options)

    def seal_captures(self) -> None:
        """Wait until the stores have all seals. Captures that open later, or are not sealed yet, are not sealed."""
        if self._delivery is not None:
            self._delivery.close_stores()

    def close_later(self) -> None:
        """Wait until all running requests have ended, then seal their captures and close.

        After 5 seconds, requests that still run are aborted: an engine that vLLM stops without `--shutdown-timeout`
        ends none of them. Returns at once, because vLLM ends others only after its engine has stopped. The process
        waits until all is done.
        """
        if threading.current_thread() is threading.main_thread():
            self._close_with_requests()  # at the end of a process, which starts no thread any more
        else:
            threading.Thread(target=self._close_with_requests, name="residuum-stop", daemon=False).start()

    def close(self) -> None:
        """Let the shippers send their rows, and clean up. Called after the engine has stopped."""
        if self._delivery is not None:
            self._delivery.close()
        self._startup.clean_up()

    def _close_with_requests(self) -> None:
        self._wait_for_requests(_END_SECONDS)
        if self._loop is not None and self._loop.is_running():
            for running in self._registry.running:
                self._loop.call_soon_threadsafe(running.abort)
            self._wait_for_requests(_ABORT_SECONDS)
        for running in self._registry.running:
            _log.error("request did not end before the server stopped", request_id=running.request_id)
        self.seal_captures()
        self.close()

    def _wait_for_requests(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._registry.num_running and time.monotonic() < end:
            if self._loop is None or not self._loop.is_running():
                break
            time.sleep(_POLL_SECONDS)

    async def _run_later(self, received: ReceivedRequest, options: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Wait until the server has started, then check the request and run it."""
        with as_http_errors():
            await self._startup.wait()
            serving = self._serving
            assert serving is not None  # noqa: S101 - the start has set it
            admitted = serving.admission.admit(received)
        async with aclosing(serving.runner.run(admitted, options)) as outputs:
            async for output in outputs:
                yield output

    def _serve(self, ranks: Sequence[dict[str, Any]]) -> Engine:
        """Begin to check requests, and return the engine. `ranks` are the workers' descriptions."""
        engine = self._make_engine(ranks)
        how_to_send = "Send them in vllm_xargs.residuum_vectors."
        rules = self._operator_rules(engine.facts)
        parts = RequestParts.assemble(engine, self._registry, self._settings, how_to_send, self._share, rules)
        shared = None
        if self._share.count > 1:
            limits = self._settings.max_vectors, self._settings.max_vector_mib << 20
            shared = SharedVectors(folder_of(ranks) / "vectors", *limits)
        vectors = RequestVectors(parts.vectors, shared)
        counts = _rule_counts()
        for name, action in rules.actions.items():
            counts.know(name, action)
        has_store, max_model_len = self._delivery is not None, engine.facts.max_model_len
        self._serving = _Serving(
            RequestAdmission(parts.admission, vectors, max_model_len, has_store=has_store, has_rules=self._has_rules),
            RequestRunner(
                self._llm,
                self._generate,
                engine,
                self._registry,
                parts.reservations,
                vectors,
                self._delivery,
                counts,
                self._startup.wait,
            ),
        )
        return engine

    def _make_engine(self, ranks: Sequence[dict[str, Any]]) -> Engine:
        """Return the engine behind the AsyncLLM, with this API server's share of the score board."""
        config = self._llm.vllm_config
        served = config.model_config.served_model_name
        name = served if isinstance(served, str) else config.model_config.model
        facts, board = facts_of(config, self._settings, name, ranks), None
        if path := next((rank["score_board"] for rank in ranks if rank["score_board"]), ""):
            board = ScoreBoard(open_board(path), share=(self._share.index, self._share.count))
            facts = replace(facts, probe_sites=probe_sites(facts.sites))
        return Engine(UntappedLLM(self._llm, self._generate), None, facts, scores=board)

    def _operator_rules(self, facts: ModelFacts) -> OperatorRules:
        """Return the rules of the operator's file.

        Raises:
            Failure: They do not fit the model. Every request then fails, because none would be watched.
        """
        if self._rules is None:
            return OperatorRules()
        try:
            return self._rules.for_model(facts)
        except RulesFileError as error:
            _log.error("the operator's rules cannot be used", error=str(error))
            raise Failure(
                Reason.ERROR_REASON_INTERNAL,
                "The server's rules (RESIDUUM_RULES_FILE) cannot be used; its log says why. Tell its operator.",
            ) from None


@cache
def _rule_counts() -> RuleCounts:
    """Return what counts the rules that fire in this process. vLLM's own metrics are in the same registry."""
    return RuleCounts(REGISTRY)
