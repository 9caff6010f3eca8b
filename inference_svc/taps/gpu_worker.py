"""The worker class for GPUs, named in vLLM's `worker_cls`."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from inference_svc.taps.worker import TappedWorker


class TappedGpuWorker(TappedWorker, Worker):
    """vLLM's GPU worker with taps."""
