"""The engine: all calls from the inference service to vLLM's AsyncLLM. For `vllm serve`, see `vllm_serve`."""

from __future__ import annotations

import asyncio
import inspect
import signal
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.admission.probes import probe_sites
from inference_svc.engine.adapters import load_adapters
from inference_svc.engine.arguments import prepare_environment, tapped_engine_args
from inference_svc.engine.facts import facts_of
from inference_svc.engine.ranks import check_answers, check_replicas
from inference_svc.engine.replicas import Replicas
from inference_svc.engine.sampling import asked_of_vllm, check_with_vllm
from inference_svc.engine.streams import Delta, engine_dead_failure, stream
from inference_svc.engine.unembedding import Predicted
from inference_svc.model_facts import ModelFacts
from inference_svc.requests.prompts import PromptReader
from inference_svc.requests.replies import ReplyReader
from inference_svc.requests.tokenizer_thread import TokenizerThread
from inference_svc.resources.score_board import ScoreBoard, ScoreMemory
from inference_svc.taps.vllm.worker import REFUSAL_FILE
from residuum.rpc.errors import Failure
from residuum.wire.rows.encodings import SAE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    import numpy.typing as npt
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest

    from inference_svc.settings import InferenceSettings
    from inference_svc.taps.encodings.projections import Projection
    from inference_svc.taps.plan import Operation, RequestPlan
    from residuum.v1 import inference_pb2

_T = TypeVar("_T")

_DRAIN_POLL_SECONDS = 0.02
_DEATH_POLL_SECONDS = 1.0
"""How often a call that waits for its answer checks whether the engine has died."""


class EngineRefusedError(RuntimeError):
    """The taps refuse the model or the engine, because captured rows would be wrong."""


class Engine:
    """A running vLLM engine whose workers have the taps.

    Attributes:
        facts: What is served.
        prompts: Turns prompts into token IDs.
        replies: Turns tokens into text.
        scores: The scores of probes; None: the engine has no probes.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        tokenizer: Any,
        facts: ModelFacts,
        adapters: Mapping[str, LoRARequest] | None = None,
        scores: ScoreBoard | None = None,
    ) -> None:
        """Wrap a running engine; see `start`.

        Args:
            llm: The engine of vLLM.
            tokenizer: Its tokenizer. None: prompts and replies are token IDs only.
            facts: What is served.
            adapters: The loaded LoRA adapters by name; None: there are none.
            scores: The score board; None: the engine has no probes.
        """
        self.scores = scores
        self._llm = llm
        self._replicas = Replicas(llm, facts.data_parallel_size)
        self._adapters = adapters or {}
        self._thread = TokenizerThread(tokenizer)
        self.prompts = PromptReader(self._thread, facts)
        self.replies = ReplyReader(self._thread)
        self.facts = facts

    @classmethod
    async def start(cls, settings: InferenceSettings, control_dir: str) -> Engine:
        """Load the model and start the engine. This takes between 20 seconds and several minutes.

        Args:
            settings: The service's settings.
            control_dir: A private folder for the control sockets of the rings.

        Raises:
            EngineRefusedError: The taps cannot serve this model or this engine configuration. The message says why.
            UnsupportedEngineError: This service does not run all replicas of the engine.
            IncompatibleEngineError: vLLM lacks a name that calls to several replicas use.
            AdapterError: A LoRA adapter cannot be loaded. The message names it.
            Exception: vLLM cannot serve the model; it raises exceptions of many types.
        """
        # In a thread, so that the event loop answers health checks while the model loads.
        arguments = await _in_thread(tapped_engine_args, settings)
        memory = _score_memory(settings, arguments)
        prepare_environment(settings, control_dir, memory.path if memory else "")
        llm = await _in_thread(_start_llm, arguments, Path(control_dir, REFUSAL_FILE))
        try:
            tokenizer = await tokenizer_of(llm)
            replicas = Replicas(llm, llm.vllm_config.parallel_config.data_parallel_size)
            replicas.check()
            described = await replicas.call("residuum_describe")
            check_answers("residuum_describe", described)
            check_replicas(described, llm.vllm_config.model_config.get_total_num_hidden_layers())
            ranks = [rank for replica in described for rank in replica]
            adapters = await load_adapters(llm.add_lora, settings.adapters, llm.vllm_config.model_config.hf_config)
            facts = facts_of(llm.vllm_config, settings, settings.visible_name, ranks, adapters)
            if memory is not None:
                facts = replace(facts, probe_sites=probe_sites(facts.sites))
            if settings.sae_mib:
                facts = replace(facts, sae_bytes=settings.sae_mib << 20, encodings=(*facts.encodings, SAE))
            return cls(llm, tokenizer, facts, adapters, ScoreBoard(memory) if memory else None)
        except BaseException:
            llm.shutdown()
            raise

    @property
    def llm(self) -> AsyncLLM:
        """The engine object of vLLM itself, for benchmarks that compare with it."""
        return self._llm

    def replicas(self) -> list[Engine]:
        """Return an engine for each replica: its requests run there, and its calls reach only the workers there."""
        found = []
        for replica in self._replicas.each():
            engine = copy(self)
            engine._replicas = replica  # noqa: SLF001 - of this class
            found.append(engine)
        return found

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts and replies can be text. Otherwise they are token IDs only."""
        return self._thread.tokenizer is not None

    async def tokenize(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Return the token IDs of a request's prompt, and check the sampling parameters that vLLM may refuse.

        Raises:
            Failure: The prompt is invalid (see `PromptReader.read`), or a parameter is (see `check_with_vllm`).
        """
        token_ids = await self.prompts.read(request)
        if asked_of_vllm(request.sampling):
            await self._thread.do(self._check_sampling, request.sampling)
        return token_ids

    def _check_sampling(self, parameters: inference_pb2.SamplingParameters) -> None:
        check_with_vllm(parameters, self._llm.vllm_config, self._thread.tokenizer)

    def generate(
        self,
        engine_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        plan: RequestPlan | None,
        cache_salt: str | None,
        adapter: str = "",
    ) -> AsyncGenerator[Delta]:
        """Generate one sequence, with a LoRA adapter if `adapter` names one; see `stream`."""
        # A shallow copy, and skip_clone makes vLLM's copy shallow too. Two deep copies doubled the time that a request
        # takes in this process. Shallow is safe: nothing writes into the nested objects except vLLM's stop token IDs,
        # and these are the same for all requests.
        sampling = copy(sampling)
        sampling.skip_clone = True
        sampling.extra_args = plan.to_extra_args() if plan else None
        # Positions that are read from the prefix cache have no rows to capture, and no log-probabilities.
        needs_whole_prompt = plan is not None and plan.needs_whole_prompt
        sampling.skip_reading_prefix_cache = needs_whole_prompt or sampling.prompt_logprobs is not None
        sampling.detokenize = self.has_tokenizer
        # The form that vLLM's own renderer returns. `PromptReader` has already done the renderer's checks of token IDs.
        prompt = tokens_input(list(prompt_token_ids), cache_salt=cache_salt)
        lora = self._adapters[adapter] if adapter else None
        return stream(self._llm, prompt, sampling, engine_id, lora, self._replicas.chosen)

    async def load_vectors(self, rows: Sequence[tuple[int, bytes]]) -> None:
        """Write vectors into rows of every rank's vector bank; see `VectorBank.load`."""
        await self._call("residuum_load_vectors", list(rows))

    async def keep_signs(self, projections: Sequence[Projection], owner: int = 0) -> list[bool | str]:
        """Make every rank compute the signs of these projections in the background, and keep no others.

        Returns:
            For each projection, whether every rank has its signs by now; or, as text, why a rank cannot make them.

        Raises:
            Failure: The engine is dead.
        """
        ranks = await self._call("residuum_keep_signs", [tuple(item) for item in projections], owner)
        return [_ready(states) for states in zip(*ranks, strict=True)]

    async def keep_saes(self, wanted: Sequence[tuple[str, bytes, str, int]]) -> list[bool | str]:
        """Make every rank keep these encoders of sparse autoencoders, and no others; see `SAECache.keep`.

        Args:
            wanted: The fields of a `WantedSAE` for each.

        Returns:
            For each, whether every rank has it by now; or, as text, why a rank cannot load it.

        Raises:
            Failure: The engine is dead.
        """
        ranks = await self._call("residuum_keep_saes", list(wanted))
        return [_ready(states) for states in zip(*ranks, strict=True)]

    async def change_steering(self, changes: Mapping[str, Sequence[Operation]]) -> dict[str, int | None]:
        """Replace the steering operations of requests, from the next step on.

        Args:
            changes: The new operations of each request, by its `RequestPlan.name`.

        Returns:
            For each request, the first position with the new operations; None if the request has ended. Workers keep
            a change of a request that they do not know, until it starts or `forget` drops the change: those of every
            replica but one, and all of them if the answer is 0.

        Raises:
            Failure: The engine is dead.
        """
        data = {name: [operation.to_data() for operation in operations] for name, operations in changes.items()}
        replicas: list[list[dict[str, int | None]]] = await self._call_each("residuum_change_steering", data)
        for ranks in replicas:
            if any(rank != ranks[0] for rank in ranks):
                raise RuntimeError(
                    f"The ranks changed the steering at different positions: {ranks}. This is a defect of residuum: "
                    "please report it."
                )
        return {name: _position([ranks[0][name] for ranks in replicas]) for name in data}

    async def forget(self, names: Sequence[str]) -> None:
        """Drop steering changes of requests that have not reached the workers."""
        await self._call("residuum_forget", list(names))

    async def take_probe(self, capture_id: str) -> list[tuple[list[tuple[int, int]], list[int], bytes]]:
        """Return the self-test's rows from every rank; see `TappedWorker.residuum_take_probe`."""
        parts = await self._call("residuum_take_probe", capture_id)
        return [block for rank in parts for block in rank]

    async def listen_to_logits(self) -> None:
        """Make workers record the inputs of the unembedding, until `explain_logits` is called."""
        await self._call("residuum_listen_to_logits")

    async def explain_logits(self, rows: bytes, tokens: Sequence[int]) -> list[tuple[float, float]]:
        """Compare served tokens with those that captured rows predict; see `TappedWorker.residuum_explain_logits`.

        Returns:
            The fields of the `Explanation` of each rank that computes logits.
        """
        ranks = await self._call("residuum_explain_logits", rows, list(tokens))
        return [tuple(rank) for rank in ranks if rank is not None]

    async def unembed(self, rows: npt.NDArray[np.float32], num_top: int, tokens: Sequence[int]) -> Predicted:
        """Return the tokens that rows of the residual stream predict; see `TappedWorker.residuum_unembed`.

        The engine runs no step meanwhile, so the rows of one call should be few.

        Args:
            rows: [rows, hidden].
            num_top: How many of the most likely tokens to return for each row.
            tokens: A token for each row, or none.
        """
        replica = self.replicas()[0]  # all have the same weights
        ranks = await replica._call("residuum_unembed", rows.tobytes(), num_top, list(tokens))  # noqa: SLF001 - of this class
        return Predicted.from_bytes(next(rank for rank in ranks if rank is not None), num_top)

    async def map_rows(self, rows: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float32]:
        """Return what an encoder in the workers makes of rows; see `TappedWorker.residuum_map_rows`.

        Args:
            rows: [rows, hidden].
            name: The encoder's name; see `sae_name`. It has as many features as rows have elements.
        """
        replica = self.replicas()[0]
        ranks = await replica._call("residuum_map_rows", rows.tobytes(), name)  # noqa: SLF001 - of this class
        return np.frombuffer(next(rank for rank in ranks if rank is not None), "<f4").reshape(rows.shape)

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until the stores have acknowledged every captured row, and return whether they have.

        The timeout covers the calls to the workers too: a worker whose step waits for the store does not answer, and
        vLLM never answers calls to an engine that dies.
        """
        try:
            await asyncio.wait_for(self._drained(timeout_seconds), timeout_seconds)
        except (asyncio.TimeoutError, Failure):
            return False
        return True

    async def _drained(self, timeout_seconds: float) -> None:
        while not all(await self._call("residuum_drain", timeout_seconds)):  # noqa: ASYNC110 - it asks another process
            await asyncio.sleep(_DRAIN_POLL_SECONDS)  # the engine needs this time for the step that sends the last rows

    async def _call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every worker, and return the answers of all ranks; see `_call_each`."""
        return [answer for ranks in await self._call_each(method, *arguments) for answer in ranks]

    async def _call_each(self, method: str, *arguments: object) -> list[list[Any]]:
        """Call a method of every worker, and return the answers of each replica's ranks.

        Raises:
            Failure: The engine is dead.
            RankFailedError: The method failed in a worker.
        """
        call = asyncio.ensure_future(self._replicas.call(method, arguments))
        try:
            # vLLM never answers calls to an engine that dies while they wait.
            while not (await asyncio.wait({call}, timeout=_DEATH_POLL_SECONDS))[0]:
                if self.is_dead:
                    raise engine_dead_failure()
            answers = call.result()
        except EngineDeadError as error:
            raise engine_dead_failure() from error
        finally:
            call.cancel()
        check_answers(method, answers)
        return answers

    @property
    def is_dead(self) -> bool:
        """Whether the engine has died."""
        return bool(self._llm.errored)

    def shutdown(self) -> None:
        """Stop the engine's processes."""
        self._llm.shutdown()


async def _in_thread(work: Callable[..., _T], *arguments: object) -> _T:
    """Return what a function returns, from a thread that the end of the event loop does not wait for.

    vLLM asks the model's hub, which may not answer for minutes.
    """
    return await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), work, *arguments)


def _start_llm(arguments: AsyncEngineArgs, refusal: Path) -> AsyncLLM:
    """Start the engine while this thread blocks SIGINT, which the engine's processes inherit.

    Ctrl-C in a terminal reaches every process of the job. Only the service handles it, and stops the engine in order.

    Args:
        arguments: vLLM's arguments.
        refusal: The file that a worker writes if the taps refuse to start.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return AsyncLLM.from_engine_args(arguments)
    except Exception as error:
        # vLLM only reports that a worker failed. The worker wrote the reason of the taps into this file.
        if refusal.exists():
            raise EngineRefusedError(refusal.read_text()) from error
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _score_memory(settings: InferenceSettings, arguments: AsyncEngineArgs) -> ScoreMemory | None:
    """Return memory for scores; None without probes. Steps of several replicas or stages have no common order."""
    is_single = arguments.data_parallel_size == arguments.pipeline_parallel_size == 1
    return ScoreMemory(settings.score_mib << 20) if settings.score_mib and is_single else None


async def tokenizer_of(llm: AsyncLLM) -> Any:
    """Return the engine's tokenizer, or None if the engine was started without one (`skip_tokenizer_init`)."""
    if llm.vllm_config.model_config.skip_tokenizer_init:
        return None
    tokenizer = llm.get_tokenizer()
    return await tokenizer if inspect.isawaitable(tokenizer) else tokenizer


def _position(answers: Sequence[int | None]) -> int | None:
    """Return the first position of a change, from the replicas' answers. Replicas without the request answer 0."""
    return None if None in answers else max(position for position in answers if position is not None)


def _ready(states: Sequence[bool | str]) -> bool | str:
    """Return whether all ranks are ready; or the first error text, if a rank reports one."""
    return next((state for state in states if isinstance(state, str)), all(states))
