"""The worker for CPUs with taps that do nothing; see `noop_taps`."""

from __future__ import annotations

from bench.capture.workers.noop_taps import NoopTaps
from inference_svc.taps.vllm.cpu_worker import TappedCpuWorker


class NoopWorker(NoopTaps, TappedCpuWorker):
    """residuum's worker with taps that do nothing."""
