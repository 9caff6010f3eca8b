"""Checks one architecture: serves its tiny model, sends requests, and compares every row with transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import residuum
from bench.conformance.architectures import Architecture
from bench.conformance.architectures.architecture import FINAL
from bench.conformance.compare import compare
from bench.conformance.killed import kill_worker
from bench.conformance.models import make_model
from bench.conformance.quantized import QUANTIZATIONS, quantize
from bench.conformance.results import Outcome, Verdict, failure_of
from bench.conformance.setup import Setup
from svc_common.launcher import Launch, Service, ServiceFailedError, launch_module, start_inference

_SHARED_GPU = {"gpu_memory_utilization": 0.05}
"""vLLM starts only if this part of the GPU's memory is free. Several architectures run at a time."""
_START_SECONDS = 300.0


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
            comparison, layout = compare(architecture, setup, service.endpoint, model, folder / "stock")
            if setup.kill:
                comparison.ends_killed = kill_worker(setup, service.process.pid, service.endpoint, store)
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
        if comparison.site_layers.keys() != (architecture.partial | FINAL).intersection(setup.sites):
            faults.append(f"the service has these sites in some layers only: {comparison.site_layers}")
        served = _told_when_ready(service.log.read_text(errors="replace"))
        return Outcome(
            name=architecture.name,
            verdict=Verdict.WRONG if faults else Verdict.EXACT,
            detail="; ".join(faults),
            sites=setup.sites,
            site_layers=comparison.site_layers,
            quantization=setup.quantization,
            layers=architecture.layers,
            rows=comparison.rows,
            missing=comparison.missing,
            min_cosine=comparison.min_cosine,
            mean_cosine=comparison.mean_cosine,
            max_error=comparison.max_error,
            least_layer_distance=comparison.least_layer_distance,
            logprob_error=comparison.logprob_error,
            lens_error=comparison.lens_error,
            attention_layers=comparison.attention_layers,
            attention_error=comparison.attention_error,
            other_experts=comparison.explained.rows,
            widest_tie=comparison.explained.widest_gap,
            changed_rows=comparison.changed_rows,
            rows_alone=comparison.rows_alone,
            other_bits=comparison.other_bits,
            other_places=dict(comparison.other_places),
            ends_killed=None if comparison.ends_killed is None else dict(comparison.ends_killed),
            states=dict(comparison.states),
            layout=layout,
            replicas=int(served.get("replicas", 1)),
            capturing_ranks=int(served.get("capturing_ranks", 0)),
            model_runner=str(served.get("model_runner", "")),
            start_seconds=start_seconds,
            seconds=time.perf_counter() - started,
        )


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
