"""The worker class for CPUs, named in vLLM's `worker_cls`.

Import it on a CPU machine alone: importing vLLM's CPU worker replaces parts of `torch.cuda`.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from inference_svc.taps.worker import TappedWorker


class TappedCpuWorker(TappedWorker, CPUWorker):
    """vLLM's CPU worker with taps."""
