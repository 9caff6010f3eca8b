"""The engines that are measured: stock vLLM, and vLLM with residuum's worker."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import NamedTuple, Protocol

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from bench.capture.workers import noop_taps
from inference_svc.engine.arguments import engine_arguments
from inference_svc.engine.engine import Engine
from inference_svc.engine.facts import model_runner
from inference_svc.engine.streams import Delta, stream
from inference_svc.selftest import self_test_replicas
from inference_svc.settings import InferenceSettings
from inference_svc.taps.plan import RequestPlan

_SETTLE_SECONDS = 300.0
_POLL_SECONDS = 0.001


class Subject(Protocol):
    """An engine under measurement."""

    @property
    def num_layers(self) -> int:
        """Decoder layers of its model."""

    @property
    def vocab_size(self) -> int:
        """The size of its model's vocabulary."""

    @property
    def model_runner(self) -> str:
        """The model runner of vLLM that it uses."""

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        plan: RequestPlan | None,
        on_first: Callable[[], None],
    ) -> list[int]:
        """Generate, call `on_first` when the first token is there, and return the token IDs of the reply."""

    async def hold(self) -> None:
        """Let requests wait in the engine until `release`."""

    async def release(self, requests: int) -> float:
        """Begin to compute once the engine has this many requests; return the time, on `time.perf_counter`."""

    async def call(self, method: str, *arguments: object) -> None:
        """Call a method of `WorkerExtension` in every worker."""

    def shutdown(self) -> None:
        """Stop its processes."""


class StockSubject:
    """vLLM's AsyncLLM with vLLM's own worker."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.num_layers: int = llm.vllm_config.model_config.get_total_num_hidden_layers()
        self.vocab_size: int = llm.vllm_config.model_config.get_vocab_size()
        self.model_runner = model_runner(llm.vllm_config)

    @classmethod
    async def start(cls, settings: InferenceSettings) -> StockSubject:
        """Start it with the arguments that the service passes, except those that add the taps."""
        arguments = AsyncEngineArgs(**engine_arguments(settings))
        return cls(await asyncio.to_thread(AsyncLLM.from_engine_args, arguments))

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        plan: RequestPlan | None,
        on_first: Callable[[], None],
    ) -> list[int]:
        """See `Subject`. Stock vLLM cannot carry out a plan."""
        assert plan is None  # noqa: S101 - modes with a plan never run on stock
        # Uses the service's loop over vLLM's outputs, so that only the taps differ.
        deltas = stream(self.llm, {"prompt_token_ids": list(prompt)}, sampling.clone(), request_id)
        return await _reply(deltas, on_first)

    async def hold(self) -> None:
        """See `Subject`."""
        await _hold(self.llm)

    async def release(self, requests: int) -> float:
        """See `Subject`."""
        return await _release(self.llm, requests)

    async def call(self, method: str, *arguments: object) -> None:
        """See `Subject`."""
        await self.llm.collective_rpc(method, args=arguments)

    def shutdown(self) -> None:
        """See `Subject`."""
        self.llm.shutdown()


class TappedSubject:
    """The service's engine, without the rest of the service."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_layers = engine.facts.num_layers
        self.vocab_size = engine.facts.vocab_size
        self.model_runner = engine.facts.model_runner

    @classmethod
    async def start(cls, settings: InferenceSettings, folder: str, *, noop: bool = False) -> TappedSubject:
        """Start the engine and run the service's self-test: only an engine that captures and steers is measured.

        Args:
            settings: The service's settings.
            folder: A private folder for sockets.
            noop: Use taps that do nothing, and skip the self-test.
        """
        if noop:
            with noop_taps.installed():
                return cls(await Engine.start(settings, folder))
        engine = await Engine.start(settings, folder)
        try:
            await self_test_replicas(engine)
        except BaseException:
            engine.shutdown()
            raise
        return cls(engine)

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        plan: RequestPlan | None,
        on_first: Callable[[], None],
    ) -> list[int]:
        """See `Subject`."""
        return await _reply(self.engine.generate(request_id, prompt, sampling, plan, None), on_first)

    async def hold(self) -> None:
        """See `Subject`."""
        await _hold(self.engine._llm)  # noqa: SLF001 - the service never does this

    async def release(self, requests: int) -> float:
        """See `Subject`."""
        return await _release(self.engine._llm, requests)  # noqa: SLF001 - as above

    async def call(self, method: str, *arguments: object) -> None:
        """See `Subject`."""
        await self.engine._llm.collective_rpc(method, args=arguments)  # noqa: SLF001 - the service never calls these

    async def settle(self) -> None:
        """Wait until every captured row is acknowledged."""
        if not await self.engine.drain(_SETTLE_SECONDS):
            raise TimeoutError(f"captured rows were not acknowledged in {_SETTLE_SECONDS:.0f} s")

    def shutdown(self) -> None:
        """See `Subject`."""
        self.engine.shutdown()


async def _hold(llm: AsyncLLM) -> None:
    if "mode" not in signature(llm.pause_generation).parameters:
        raise RuntimeError("--at-once needs vLLM 0.32: this version cannot hold requests back. Leave --at-once out.")
    await llm.pause_generation(mode="keep", clear_cache=False)


async def _release(llm: AsyncLLM, requests: int) -> float:
    while llm.output_processor.get_num_unfinished_requests() < requests:  # noqa: ASYNC110 - vLLM has no event for it
        await asyncio.sleep(_POLL_SECONDS)
    began = time.perf_counter()
    await llm.resume_generation()
    return began


async def _reply(deltas: AsyncIterable[Delta], on_first: Callable[[], None]) -> list[int]:
    """Return the token IDs of a reply, and call `on_first` when the first are there."""
    reply: list[int] = []
    async for delta in deltas:
        if not reply:
            on_first()
        reply.extend(delta.token_ids)
    return reply


class WrongTokenCountError(RuntimeError):
    """A reply does not have the requested length, so the run is invalid."""


class Batch(NamedTuple):
    """The replies to requests that were submitted at the same time."""

    replies: list[list[int]]
    """The token IDs of the replies, in the order of the prompts."""
    started: float
    """The time of the submission, on `time.perf_counter`."""
    ended: float
    """The time of the last token of the last reply."""
    prompted: float | None = None
    """The time at which every request had its first token; None if unknown."""


async def generate_batch(
    subject: Subject,
    prompts: Mapping[str, Sequence[int]],
    plans: Mapping[str, RequestPlan | None],
    decode: int,
    *,
    at_once: bool = False,
) -> Batch:
    """Generate `decode` tokens greedily for each prompt, all submitted at the same time.

    With `at_once`, the engine begins when it has all of them, and so does the time.
    """
    sampling = SamplingParams(max_tokens=decode, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    firsts: list[float] = []

    def note() -> None:
        firsts.append(time.perf_counter())

    requests = (subject.generate(name, prompt, sampling, plans[name], note) for name, prompt in prompts.items())
    if not at_once:
        return (await timed_batch(requests, decode))._replace(prompted=max(firsts))
    await subject.hold()
    batch, started = await asyncio.gather(timed_batch(requests, decode), subject.release(len(prompts)))
    return batch._replace(prompted=max(firsts), started=started)


async def timed_batch(requests: Iterable[Awaitable[list[int]]], decode: int) -> Batch:
    """Submit requests at the same time, and wait for their replies of `decode` tokens each."""
    started = time.perf_counter()
    replies = await asyncio.gather(*requests)
    ended = time.perf_counter()
    lengths = {len(reply) for reply in replies}
    if lengths != {decode}:
        raise WrongTokenCountError(f"replies of {sorted(lengths)} tokens instead of {decode}")
    return Batch(list(replies), started, ended)


def digest(reply: Sequence[int]) -> str:
    """Return a digest of a reply's token IDs."""
    return hashlib.sha256(repr(list(reply)).encode()).hexdigest()[:16]
