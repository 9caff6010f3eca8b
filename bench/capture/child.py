"""One run, in a process of its own: `python -m bench.capture.child JOB.json RESULT.json`, started by bench.capture."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import uvloop
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from bench.capture.memory import peak_mib
from bench.capture.results import Iteration, Run
from bench.capture.ring_sink import RingSink
from bench.capture.sinks import CaptureSink, RowsMissingError, StoreSink
from bench.capture.subjects import StockSubject, Subject, TappedSubject
from bench.capture.workload import Job, Mode
from inference_svc.settings import InferenceSettings
from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan
from residuum.v1 import selection_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_VECTOR_SCALE = 0.1
"""Standard deviation of the steering vectors' values: enough to change replies, far from breaking the model."""


class WrongTokenCountError(RuntimeError):
    """A reply is not as long as it was asked to be: the run proves nothing."""


def main() -> None:
    """Run the job in the first file; write what it measured to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    job = Job.from_json(json.loads(job_file.read_text()))
    result_file.write_text(json.dumps(asdict(uvloop.run(measure(job)))))


async def measure(job: Job) -> Run:
    """Start the engine, and measure it."""
    started = time.perf_counter()
    settings = settings_of(job)
    async with AsyncExitStack() as stack:
        subject: Subject
        if job.mode is Mode.STOCK:
            subject, tapped = await StockSubject.start(settings), None
        else:
            subject = tapped = await TappedSubject.start(settings, job.folder)
        stack.callback(subject.shutdown)
        sink = await _start_sink(job, tapped, stack) if tapped and job.mode.captures else None
        if tapped and job.mode.steers:
            await tapped.engine.load_vectors(_vectors(job.workload.batch_size, tapped.engine.facts.hidden_size))
        ready = time.perf_counter()
        driver = _Driver(job, subject, tapped, sink)
        iterations = [await driver.iterate(number) for number in range(job.workload.warmups + job.workload.iterations)]
        facts = tapped.engine.facts if tapped else None
        return Run(
            mode=job.mode,
            round=job.round,
            device=str(current_platform.device_name),
            num_layers=subject.num_layers,
            start_seconds=ready - started,
            peak_mib=peak_mib(),
            capture_pool_mib=facts.pool_bytes / (1 << 20) if facts else 0.0,
            ring_mib=facts.ring_bytes / (1 << 20) if facts else 0.0,
            iterations=tuple(iterations[job.workload.warmups :]),
        )


def settings_of(job: Job) -> InferenceSettings:
    """Return the service's settings for a job. The prefix cache is off: each iteration computes its prompts."""
    workload = job.workload
    return InferenceSettings(
        model=workload.model,
        store=job.store,
        enforce_eager=workload.eager,
        max_num_seqs=max(InferenceSettings.model_fields["max_num_seqs"].default, workload.batch_size),
        kv_cache_gib=workload.kv_cache_gib,
        ring_mib=workload.ring_mib,
        shippers=workload.shippers,
        engine_args={"enable_prefix_caching": False, **workload.engine_args},
    )


class _Driver:
    """Puts the workload to a subject, an iteration at a time."""

    def __init__(self, job: Job, subject: Subject, tapped: TappedSubject | None, sink: CaptureSink | None) -> None:
        self._job = job
        self._subject = subject
        self._tapped = tapped
        self._sink = sink
        self._sampling = SamplingParams(
            max_tokens=job.workload.decode,
            temperature=0.0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )

    async def iterate(self, number: int) -> Iteration:
        """Generate for one batch; its captures are opened before the clock starts, and checked after it stops.

        Raises:
            WrongTokenCountError: A reply has another length than was asked for.
            RowsMissingError: A capture is not complete.
        """
        prompts = {
            f"{number}-{index}": prompt
            for index, prompt in enumerate(self._job.workload.prompts(number, self._subject.vocab_size))
        }
        plans = {name: self._plan(name, index) for index, name in enumerate(prompts)}
        if self._sink:
            await self._sink.begin(prompts)
        start = time.perf_counter()
        replies = await asyncio.gather(
            *(self._subject.generate(name, prompt, self._sampling, plans[name]) for name, prompt in prompts.items())
        )
        generated = time.perf_counter()
        if self._sink and self._tapped:
            await self._tapped.settle()
        settled = time.perf_counter() if self._sink else generated
        return await self._check(prompts, replies, generated - start, settled - start)

    async def _check(
        self, prompts: Mapping[str, Sequence[int]], replies: Sequence[list[int]], generated: float, settled: float
    ) -> Iteration:
        workload = self._job.workload
        lengths = {len(reply) for reply in replies}
        if lengths != {workload.decode}:
            raise WrongTokenCountError(f"replies of {sorted(lengths)} tokens instead of {workload.decode}")
        rows = num_bytes = 0
        if self._sink:
            arrived = await self._sink.finish(dict(zip(prompts, replies, strict=True)))
            rows, num_bytes = arrived.rows, arrived.num_bytes
            expected = self._subject.num_layers * workload.rows_per_request * workload.batch_size
            if rows != expected:
                raise RowsMissingError(f"{rows} rows arrived instead of {expected}")
        return Iteration(
            generation_seconds=generated,
            settled_seconds=settled,
            prompt_tokens=sum(map(len, prompts.values())),
            generated_tokens=sum(map(len, replies)),
            rows=rows,
            num_bytes=num_bytes,
            replies=tuple(hashlib.sha256(repr(reply).encode()).hexdigest()[:16] for reply in replies),
        )

    def _plan(self, name: str, index: int) -> RequestPlan | None:
        mode = self._job.mode
        if not (mode.captures or mode.steers):
            return None
        layers = tuple(range(self._subject.num_layers))
        everywhere = selection_pb2.PositionSelection()
        return RequestPlan(
            prompt_tokens=self._job.workload.prefill,
            capture=Capture(name, 0, layers, everywhere) if mode.captures else None,
            operations=(Operation(Kind.ADD, index, layers, everywhere),) if mode.steers else (),
        )


async def _start_sink(job: Job, tapped: TappedSubject, stack: AsyncExitStack) -> CaptureSink:
    facts = tapped.engine.facts
    sink: CaptureSink
    if job.needs_store:
        sink = StoreSink(facts, job.store, job.workload.shippers)
    else:
        sink = RingSink(facts, job.workload.rows_per_request)
    stack.push_async_callback(sink.stop)
    await sink.start()
    return sink


def _vectors(count: int, hidden: int) -> list[tuple[int, bytes]]:
    source = np.random.default_rng(0)
    return [(row, (_VECTOR_SCALE * source.standard_normal(hidden)).astype("<f4").tobytes()) for row in range(count)]


if __name__ == "__main__":
    main()
