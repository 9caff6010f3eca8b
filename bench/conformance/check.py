"""Checks one architecture: serves its tiny model, sends requests, and compares every row with transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import residuum
from bench.conformance.architectures import MAX_LENGTH, Architecture
from bench.conformance.models import make_model
from bench.conformance.quantized import QUANTIZATIONS, quantize
from bench.conformance.reference import Reference, adding
from bench.conformance.results import Bounds, Comparison, Outcome, Rows, Verdict, failure_of
from bench.conformance.stock import stock_rows
from bench.conformance.workload import CHUNK, NEW_TOKENS, Request, make_requests
from svc_common.launcher import Launch, Service, ServiceFailedError, launch_module, start_inference

_GARBAGE = "bench.conformance.garbage.Garbage"
"""The worker extension that fills uninitialised memory. It is only named here, because importing its module has that
effect."""
_SHARED_GPU = {"gpu_memory_utilization": 0.05}
"""vLLM starts only if this part of the GPU's memory is free. Several architectures run at a time."""
_START_SECONDS = 300.0
_REQUEST_SECONDS = 120.0


@dataclass(frozen=True)
class Setup:
    """The setup of the engine, the same for every architecture."""

    dtype: str = "float32"
    eager: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sites: tuple[str, ...] = ("resid_post",)
    kv_cache_gib: float = 0.1
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments for vLLM's engine."""
    garbage: bool = False
    """Whether the worker's uninitialised memory is filled with garbage."""

    quantization: str = ""
    """The format of the weights, one of `QUANTIZATIONS`; empty if they are not quantised. Then the reference is stock
    vLLM, which has only the stream, and steered requests are not compared."""
    max_error: float = 0.0
    """The largest allowed error of a row; 0 for the default of the dtype."""

    def bounds(self, architecture: Architecture) -> Bounds:
        """Return the bounds for an architecture's rows."""
        bounds = Bounds.of(self.dtype, self.max_error)
        return replace(bounds, max_error=self.max_error or max(bounds.max_error, architecture.max_error))

    def arguments(self) -> list[str]:
        """Return the inference service's flags."""
        engine_args = {**self.engine_args, "worker_extension_cls": _GARBAGE} if self.garbage else self.engine_args
        values = {
            "dtype": self.dtype,
            "tensor-parallel-size": self.tensor_parallel_size,
            "pipeline-parallel-size": self.pipeline_parallel_size,
            "kv-cache-gib": self.kv_cache_gib,
            "max-num-batched-tokens": CHUNK,
            "max-num-seqs": len(make_requests()),
            "max-model-len": MAX_LENGTH,
            "ring-mib": 4,
            "engine-args": json.dumps(engine_args),
        }
        if self.sites != ("resid_post",):
            values["capture-sites"] = ",".join(self.sites)
        flags = [f"--{name}={value}" for name, value in values.items()]
        return [*flags, "--enforce-eager"] if self.eager else flags

    def stock_arguments(self) -> dict[str, Any]:
        """Return the arguments for the engine of stock vLLM that computes the reference."""
        return {
            **self.engine_args,
            "dtype": self.dtype,
            "kv_cache_memory_bytes": int(self.kv_cache_gib * (1 << 30)),
            "max_num_batched_tokens": MAX_LENGTH,
            "max_model_len": MAX_LENGTH,
        }


def check(
    architecture: Architecture, setup: Setup, store: str, folder: Path, launch: Launch = launch_module
) -> Outcome:
    """Serve one architecture with both services, and compare every row.

    Args:
        architecture: The architecture.
        setup: The setup of the engine.
        store: host:port of a running store.
        folder: An empty folder for the model and the logs.
        launch: Starts the inference service's process.
    """
    started = time.perf_counter()
    model = make_model(architecture, folder / architecture.name)
    gpu = torch.cuda.is_available()
    engine_args = {**(_SHARED_GPU if gpu else {}), **architecture.arguments(gpu=gpu), **setup.engine_args}
    needs_gpu = architecture.needs_gpu
    if setup.quantization:
        quantization = QUANTIZATIONS[setup.quantization]
        quantize(model, quantization)
        engine_args |= quantization.engine_args
        needs_gpu |= quantization.needs_gpu
    setup = replace(setup, engine_args=engine_args)
    with _running(model, store, setup.arguments(), folder, launch) as service:
        try:
            service.wait_until_serving(_START_SECONDS)
            start_seconds = time.perf_counter() - started
            comparison, layout = _compare(architecture, setup, service.endpoint, model, folder / "stock")
        except (ServiceFailedError, residuum.ResiduumError) as error:
            verdict, detail = failure_of(
                service.log.read_text(errors="replace"), expected=architecture.refusal(setup.sites)
            )
            if verdict is Verdict.FAILED and needs_gpu and not gpu:
                verdict, detail = Verdict.REFUSED, f"by vLLM, without a GPU: {detail}"
            if isinstance(error, residuum.ResiduumError):  # a call failed, so the service had started: not a refusal
                verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {error} The log's first error: {detail}"
            seconds = time.perf_counter() - started
            name = architecture.name
            return Outcome(name, verdict, detail, setup.sites, quantization=setup.quantization, seconds=seconds)
        faults = comparison.faults(setup.bounds(architecture))
        if refusal := architecture.refusal(setup.sites):
            faults.append(f"the service did not refuse with {refusal!r}")
        served = _told_when_ready(service.log.read_text(errors="replace"))
        return Outcome(
            name=architecture.name,
            verdict=Verdict.WRONG if faults else Verdict.EXACT,
            detail="; ".join(faults),
            sites=setup.sites,
            quantization=setup.quantization,
            layers=architecture.layers,
            rows=comparison.rows,
            missing=comparison.missing,
            min_cosine=comparison.min_cosine,
            mean_cosine=comparison.mean_cosine,
            max_error=comparison.max_error,
            least_layer_distance=comparison.least_layer_distance,
            other_experts=comparison.explained.rows,
            widest_tie=comparison.explained.widest_gap,
            states=dict(comparison.states),
            layout=layout,
            capturing_ranks=int(served.get("capturing_ranks", 0)),
            model_runner=str(served.get("model_runner", "")),
            start_seconds=start_seconds,
            seconds=time.perf_counter() - started,
        )


@dataclass(frozen=True)
class _Answer:
    """What came of a request."""

    request: Request
    acts: residuum.Activations
    token_ids: list[int]
    """The prompt and the reply without its last token, which is never fed to the model."""


def _compare(
    architecture: Architecture, setup: Setup, endpoint: str, model: Path, scratch: Path
) -> tuple[Comparison, tuple[int, int]]:
    requests = [request for request in make_requests() if not (setup.quantization and request.pushes)]
    with residuum.Client(endpoint) as client, ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: _ask(client, setup, request), requests))
    comparison, bounds = Comparison(), setup.bounds(architecture)
    for answer, expected in zip(
        answers, _expected(architecture, setup, model, scratch, answers, comparison), strict=True
    ):
        comparison.states[answer.acts.manifest.state] += 1
        comparison.see_layers(expected["resid_post"])
        for site in setup.sites:
            rows = answer.acts.select(site=site)
            stream = expected["resid_pre"] if bounds.of_stream else None
            comparison.add(rows.stack(), rows.present, expected[site], stream)
    layout = answers[0].acts.manifest.proto.description.layout
    return comparison, (layout.tensor_parallel_size, layout.pipeline_parallel_size)


def _expected(
    architecture: Architecture,
    setup: Setup,
    model: Path,
    scratch: Path,
    answers: Sequence[_Answer],
    comparison: Comparison,
) -> Iterator[Mapping[str, Rows]]:
    """Return the reference's rows for each request, at each site."""
    if setup.quantization:
        sequences = [answer.token_ids for answer in answers]
        for rows in stock_rows(model, setup.stock_arguments(), sequences, scratch):
            yield {"resid_post": rows, "resid_pre": np.concatenate([rows[:1], rows[:-1]])}
        return
    reference = Reference(architecture, model)
    for answer in answers:
        changes = {layer: adding(push) for layer, push in answer.request.pushes.items()}
        run = partial(reference.rows, answer.token_ids, changes)
        if architecture.routed:
            got = {site: answer.acts.select(site=site).stack().astype(np.float32) for site in setup.sites}
            yield comparison.explain(run, got, setup.bounds(architecture))
        else:
            yield run()


def _ask(client: residuum.Client, setup: Setup, request: Request) -> _Answer:
    reply = client.generate(
        list(request.prompt),
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        temperature=1.0,  # sampled, because greedy replies of a tiny random model repeat themselves
        capture=residuum.Capture(layers="all", sites=setup.sites),
        steer=[residuum.Add(residuum.Vector.from_array(push), layer=at) for at, push in request.pushes.items()],
        timeout=_REQUEST_SECONDS,
    )
    acts = client.activations(reply.request_id, allow_partial=True)
    generated = acts.manifest.sequences[0].generated_token_ids if acts.manifest.sequences else ()
    # The expected rows depend only on the request.
    return _Answer(request, acts, [*request.prompt, *generated][: len(request.prompt) + NEW_TOKENS - 1])


@contextmanager
def _running(model: Path, store: str, arguments: list[str], folder: Path, launch: Launch) -> Iterator[Service]:
    service = start_inference(folder, str(model), store, arguments, launch=launch)
    try:
        yield service
    finally:
        service.stop()


def _told_when_ready(log: str) -> dict[str, Any]:
    """Return the fields of the service's log record that says it is ready; empty if there is none."""
    for line in log.splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("event") == "serving":
                return entry
    return {}


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain data."""
    return {**asdict(outcome), "verdict": outcome.verdict.value}
