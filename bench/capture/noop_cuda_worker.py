"""The worker for GPUs whose taps do nothing; see `noop_taps`."""

from __future__ import annotations

from bench.capture.noop_taps import NoopTaps
from inference_svc.taps.vllm.gpu_worker import TappedGpuWorker


class NoopWorker(NoopTaps, TappedGpuWorker):
    """Our worker, but for what its taps do."""
