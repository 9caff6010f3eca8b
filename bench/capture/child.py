"""One measuring process of bench.capture; see `bench.child`."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import uvloop
from vllm.platforms import current_platform

from bench.capture.results import Iteration, Memory, Run
from bench.capture.sinks.fetcher import Fetcher
from bench.capture.sinks.ring_sink import RingSink
from bench.capture.sinks.sink import Arrived, CaptureSink, RowsMissingError
from bench.capture.sinks.store_sink import StoreSink
from bench.capture.subjects import StockSubject, Subject, TappedSubject, digest, generate_batch
from bench.capture.workers.extension import EXTENSION
from bench.capture.workload import Job, Mode, Runner, Vectors, Workload, iterations_per_turn, turns
from bench.machine import used_mib
from bench.memory import peak_mib
from bench.plain import restore
from bench.processes import hand_over
from inference_svc.model_facts import ModelFacts
from inference_svc.settings import InferenceSettings
from inference_svc.tap_settings import SITES
from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan, RowEncoding
from residuum.v1 import selection_pb2
from residuum.wire.rows.encodings import ENCODINGS

EVERYWHERE = selection_pb2.PositionSelection()
_MIB = 1 << 20
_WARM_UP_SECONDS = 2.0
VECTOR_SCALE = 0.1
"""Standard deviation of the steering vectors' values: large enough to change replies, but too small to break the
model."""


class WrongRunnerError(RuntimeError):
    """vLLM chose another model runner than the one requested."""


class NoSuchLayerError(ValueError):
    """The model has fewer layers than were requested."""


def main() -> None:
    """Run the job in the first file, and write its measurements to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    job = restore(Job, json.loads(job_file.read_text()))
    uvloop.run(run(job, result_file))


async def run(job: Job, result_file: Path) -> None:
    """Run a job; does not return unless it fails."""
    async with AsyncExitStack() as stack:
        hand_over(result_file, [asdict(run) for run in await measure(job, stack)])


async def measure(job: Job, stack: AsyncExitStack) -> list[Run]:
    """Start the engine and measure it in each mode. The exit stack stops the engine."""
    started = time.perf_counter()
    settings = settings_of(job)
    subject, tapped = await start_engine(settings, job, stack)
    sink = await _start_sink(job, tapped, stack) if tapped and job.captures else None
    fetcher = None
    if sink and job.workload.fetch:
        fetcher = await asyncio.to_thread(Fetcher, job.stores)
        stack.push_async_callback(fetcher.stop)
    if tapped and any(mode.steers for mode in job.modes):
        await tapped.engine.load_vectors(_vectors(job.workload, tapped.engine.facts))
    ready = time.perf_counter()
    count = job.workload.warmups + job.workload.iterations
    driver = _Driver(job.workload, subject, tapped, sink, fetcher, spare=count + 1)
    iterations: dict[Mode, list[Iteration]] = {mode: [] for mode in job.modes}
    per_turn = iterations_per_turn(count)
    for turn, order in groupby(turns(job.modes, count), key=lambda item: item[0] // per_turn):
        async with job.baton.turn(turn):
            if job.baton.members > 1:
                await driver.warm_up(job.modes[0])
            for number, mode in order:
                iterations[mode].append(await driver.iterate(number, mode))
    if job.profile:
        await subject.call("bench_profile", "")
        await driver.iterate(count, job.modes[0])
        await subject.call("bench_profile", job.profile)
    memory = _memory(tapped.engine.facts if tapped else None)
    return [
        Run(
            mode=mode,
            round=job.round,
            runner=job.runner,
            model_runner=subject.model_runner,
            shared=len(job.modes) > 1,
            device=str(current_platform.device_name),
            num_layers=subject.num_layers,
            start_seconds=ready - started,
            memory=memory,
            iterations=tuple(iterations[mode][job.workload.warmups :]),
            folded_norms=tapped.engine.facts.folded_norms if tapped else 0,
        )
        for mode in job.modes
    ]


async def start_engine(
    settings: InferenceSettings, job: Job, stack: AsyncExitStack
) -> tuple[Subject, TappedSubject | None]:
    """Start the engine of a job, with or without taps. The exit stack stops it."""
    subject: Subject
    if not job.modes[0].tapped:
        subject, tapped = await StockSubject.start(settings), None
    else:
        subject = tapped = await TappedSubject.start(settings, job.folder, noop=job.workload.noop_taps)
    stack.callback(subject.shutdown)
    check_layers(job.workload.layers, subject.num_layers)
    if job.runner in {Runner.V1, Runner.V2} and subject.model_runner != job.runner.value:
        raise WrongRunnerError(f"vLLM chose model runner {subject.model_runner} instead of {job.runner.value}")
    return subject, tapped


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Check that the model has the requested layers."""
    if layers and layers[-1] >= num_layers:
        raise NoSuchLayerError(f"there is no layer {layers[-1]}: the model has layers 0 to {num_layers - 1}")


def settings_of(job: Job) -> InferenceSettings:
    """Return the service's settings for a job. The prefix cache is off, so that each iteration computes its prompts."""
    workload = job.workload
    defaults = InferenceSettings.model_fields
    return InferenceSettings(
        model=workload.model,
        store=job.stores,
        enforce_eager=workload.eager,
        max_model_len=workload.max_model_len,
        max_num_seqs=max(defaults["max_num_seqs"].default, workload.batch_size),
        max_num_batched_tokens=workload.max_num_batched_tokens,
        max_active_vectors=max(defaults["max_active_vectors"].default, workload.batch_size),
        kv_cache_gib=workload.kv_cache_gib,
        ring_mib=workload.ring_mib,
        shippers=workload.shippers,
        capture_sites=workload.capture_sites,
        fold_norms=False if workload.noop_taps else workload.fold_norms,
        engine_args={"enable_prefix_caching": False, "worker_extension_cls": EXTENSION, **workload.engine_args},
    )


class _Driver:
    """Runs the workload on a subject, one iteration at a time."""

    def __init__(
        self,
        workload: Workload,
        subject: Subject,
        tapped: TappedSubject | None,
        sink: CaptureSink | None,
        fetcher: Fetcher | None,
        spare: int,
    ) -> None:
        """Drive a subject. Iterations from the number `spare` on are not measured."""
        self._workload = workload
        self._spare = itertools.count(spare)
        self._subject = subject
        self._tapped = tapped
        self._sink = sink
        self._fetcher = fetcher

    async def warm_up(self, mode: Mode) -> None:
        """Work for a while: an engine that has waited for its turn is slow at first. Its caches and cores are cold."""
        until = time.perf_counter() + _WARM_UP_SECONDS
        while time.perf_counter() < until:
            await self.iterate(next(self._spare), mode)

    async def iterate(self, number: int, mode: Mode) -> Iteration:
        """Generate one batch. Its captures are opened before the clock starts, and checked after the clock stops.

        The device is idle when the clock starts and when the generation time is read.
        """
        prompts = {
            request_id(mode, number, index): prompt
            for index, prompt in enumerate(self._workload.prompts(number, self._subject.vocab_size))
        }
        plans = {name: self._plan(mode, name, index) for index, name in enumerate(prompts)}
        sink = self._sink if mode.captures else None
        if sink:
            await sink.begin(prompts, self._encoding(mode))
        await self._subject.call("bench_synchronise")
        workload = self._workload
        batch = await generate_batch(self._subject, prompts, plans, workload.decode, at_once=workload.at_once)
        await self._subject.call("bench_synchronise")
        batch = batch._replace(ended=time.perf_counter())
        settled = completed = batch.ended
        fetched: float | None = None
        if sink and self._tapped:
            replies = dict(zip(prompts, batch.replies, strict=True))
            settled, completed, fetched = await asyncio.gather(
                _time_after(self._tapped.settle()),
                _time_after(sink.complete(replies)),
                self._fetch(mode, list(prompts)),
            )
            if not sink.knows_complete:
                completed = settled
        rows = num_bytes = 0
        if sink:
            arrived = await sink.finish(dict(zip(prompts, batch.replies, strict=True)))
            rows, num_bytes = arrived.rows, arrived.num_bytes
            self._expect(mode, arrived)
        return Iteration(
            generation_seconds=batch.ended - batch.started,
            settled_seconds=settled - batch.started,
            prompt_tokens=sum(map(len, prompts.values())),
            generated_tokens=sum(map(len, batch.replies)),
            rows=rows,
            num_bytes=num_bytes,
            replies=tuple(map(digest, batch.replies)),
            completed_seconds=completed - batch.started,
            fetched_seconds=None if fetched is None else fetched - batch.started,
            first_tokens_seconds=None if batch.prompted is None else batch.prompted - batch.started,
        )

    async def _fetch(self, mode: Mode, capture_ids: Sequence[str]) -> float | None:
        """Return the time at which a client held every row; None without a client."""
        if self._fetcher is None:
            return None
        arrived = await self._fetcher.fetch(capture_ids)
        held = time.perf_counter()
        self._expect(mode, arrived)
        return held

    def _expect(self, mode: Mode, arrived: Arrived) -> None:
        workload = self._workload
        layers = workload.captured_layers(mode, self._subject.num_layers)
        expected = len(layers) * len(workload.capture_sites) * workload.rows_per_request * workload.batch_size
        if arrived.rows != expected:
            raise RowsMissingError(f"{arrived.rows} rows arrived instead of {expected}")

    def _plan(self, mode: Mode, name: str, index: int) -> RequestPlan | None:
        if not (mode.captures or mode.steers):
            return None
        num_layers = self._subject.num_layers
        layers = self._workload.captured_layers(mode, num_layers)
        return RequestPlan(
            prompt_tokens=self._workload.prefill,
            capture=capture_of(name, layers, self._workload.capture_sites, self._encoding(mode)) if layers else None,
            operations=operations(self._workload.vectors, index, num_layers) if mode.steers else (),
        )

    def _encoding(self, mode: Mode) -> RowEncoding:
        if not mode.encodes:
            return RowEncoding()
        return RowEncoding(ENCODINGS[self._workload.encoding], self._workload.dimensions)


async def _time_after(awaitable: Awaitable[None]) -> float:
    await awaitable
    return time.perf_counter()


def request_id(mode: Mode, number: int, index: int) -> str:
    """Return the ID of a request and its capture. It is unique within the engine and the store."""
    return f"{mode.name.lower()}-{number}-{index}"


def capture_of(
    capture_id: str, layers: Sequence[int], sites: Sequence[str], encoding: RowEncoding | None = None
) -> Capture:
    """Return a capture of every token at these layers and sites."""
    numbers = tuple(sorted(SITES[name] for name in sites))
    return Capture(capture_id, 0, tuple(layers), EVERYWHERE, numbers, encoding=encoding or RowEncoding())


def operations(vectors: Vectors, index: int, num_layers: int) -> tuple[Operation, ...]:
    """Return the steering operations of the request with an index."""
    if vectors is Vectors.LAYER:
        return tuple(Operation(Kind.ADD, layer, (layer,), EVERYWHERE) for layer in range(num_layers))
    return (Operation(Kind.ADD, index, tuple(range(num_layers)), EVERYWHERE),)


async def _start_sink(job: Job, tapped: TappedSubject, stack: AsyncExitStack) -> CaptureSink:
    facts = tapped.engine.facts
    layers = job.workload.layers if Mode.CUSTOM in job.modes else tuple(range(facts.num_layers))
    sink: CaptureSink
    if job.needs_store:
        sink = StoreSink(facts, job.stores, job.workload.shippers, layers, job.workload.decode)
    else:
        sink = RingSink(facts, job.workload.rows_per_request, layers)
    stack.push_async_callback(sink.stop)
    await sink.start()
    return sink


def _vectors(workload: Workload, facts: ModelFacts) -> list[tuple[int, bytes]]:
    count = facts.num_layers if workload.vectors is Vectors.LAYER else workload.batch_size
    source = np.random.default_rng(0)
    return [
        (row, (VECTOR_SCALE * source.standard_normal(facts.hidden_size)).astype("<f4").tobytes())
        for row in range(count)
    ]


def _memory(facts: ModelFacts | None) -> Memory:
    taken = Memory(peak_mib=peak_mib(), gpus_used_mib=used_mib())
    if facts is None:
        return taken
    blocks, tables, ring = (size / _MIB for size in (facts.pool_bytes, facts.table_bytes, facts.ring_bytes))
    return replace(taken, blocks_mib=blocks, tables_mib=tables, ring_mib=ring)
