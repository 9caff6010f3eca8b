"""The worker for GPUs with taps that do nothing; see `noop_taps`."""

from __future__ import annotations

from bench.capture.workers.noop_taps import NoopTaps
from inference_svc.taps.vllm.gpu_worker import TappedGpuWorker


class NoopWorker(NoopTaps, TappedGpuWorker):
    """residuum's worker with taps that do nothing."""
