"""One process of the steering benchmark, with one engine; see `bench.child`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from vllm.platforms import current_platform

from bench.capture.child import EVERYWHERE, VECTOR_SCALE, settings_of, start_engine
from bench.capture.subjects import Subject, TappedSubject, digest, generate_batch
from bench.capture.workload import Job, Mode
from bench.plain import restore
from bench.steering.engine import STOCK, Case, EngineJob, bank_row, rotated
from inference_svc.settings import InferenceSettings
from inference_svc.taps.plan import Kind, Operation, RequestPlan

_VECTORS_PER_CALL = 512
_UNSTEERED = Case(0)
_MIB = 1 << 20


def main() -> None:
    """Run the job in the first file, and write its measurements to the second."""
    job_file, result_file = map(Path, sys.argv[1:])
    told = json.loads(job_file.read_text())
    job = restore(EngineJob, told["job"])
    result_file.write_text(json.dumps(uvloop.run(measure(job, told["folder"], stock=told["stock"]))))


async def measure(job: EngineJob, folder: str, *, stock: bool) -> dict[str, Any]:
    """Start the engine, and measure the cases alternately."""
    started = time.perf_counter()
    settings = settings_for(job, folder, stock=stock)
    async with AsyncExitStack() as stack:
        subject, tapped = await start_engine(settings, child_job(job, folder, stock=stock), stack)
        facts: dict[str, Any] = {}
        if tapped:
            await load_vectors(job, tapped)
            told = tapped.engine.facts
            facts = {"folded_norms": told.folded_norms, "tables_mib": round(told.table_bytes / _MIB, 1)}
        ready = time.perf_counter()
        workload = job.workload()
        cases = (_UNSTEERED,) if stock else job.cases
        iterations = [
            await _iterate(job, subject, case, number, name=STOCK if stock else case.name)
            for number in range(workload.warmups + workload.iterations)
            for case in rotated(cases, number)
        ]
        for iteration in iterations:
            iteration["warmup"] = iteration["number"] < workload.warmups
        return {
            "model_runner": subject.model_runner,
            "device": str(current_platform.device_name),
            "num_layers": subject.num_layers,
            "start_seconds": ready - started,
            **facts,
            "iterations": iterations,
        }


def child_job(job: EngineJob, folder: str, *, stock: bool) -> Job:
    """Return the job for bench.capture."""
    return Job((Mode.STOCK if stock else Mode.STEER,), 0, job.workload(), folder, job.runner)


def settings_for(job: EngineJob, folder: str, *, stock: bool) -> InferenceSettings:
    """Return the service's settings for a job. Stock vLLM gets the same."""
    settings = settings_of(child_job(job, folder, stock=stock))
    rows = max(settings.max_active_vectors, job.bank_rows)
    return settings.model_copy(update={"max_active_vectors": rows})


async def load_vectors(job: EngineJob, tapped: TappedSubject) -> None:
    """Write the vectors of all configurations into the workers' banks."""
    source = np.random.default_rng(0)
    hidden = tapped.engine.facts.hidden_size
    vectors = [
        (row, (VECTOR_SCALE * source.standard_normal(hidden)).astype("<f4").tobytes()) for row in range(job.bank_rows)
    ]
    for at in range(0, len(vectors), _VECTORS_PER_CALL):
        await tapped.engine.load_vectors(vectors[at : at + _VECTORS_PER_CALL])


async def _iterate(job: EngineJob, subject: Subject, case: Case, number: int, *, name: str) -> dict[str, Any]:
    prompts = {
        f"{case.name.replace('=', '').replace(' ', '-')}-{number}-{index}": prompt
        for index, prompt in enumerate(job.workload().prompts(number, subject.vocab_size))
    }
    plans = {request: plan_of(job, case, index) for index, request in enumerate(prompts)}
    batch = await generate_batch(subject, prompts, plans, job.decode)
    return {
        "case": name,
        "number": number,
        "seconds": batch.ended - batch.started,
        "replies": [digest(reply) for reply in batch.replies],
    }


def plan_of(job: EngineJob, case: Case, index: int) -> RequestPlan | None:
    """Return the plan of the request with an index in a case."""
    if not case.configurations:
        return None
    configuration = index % case.configurations
    layers = range(job.num_layers)
    groups = [(layer,) for layer in layers] if case.per_layer else [tuple(layers)]
    return RequestPlan(
        prompt_tokens=job.prefill,
        operations=tuple(
            Operation(Kind.ADD, bank_row(case, job.num_layers, configuration, group[0]), group, EVERYWHERE)
            for group in groups
        ),
    )
