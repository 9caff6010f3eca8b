"""The worker class for GPUs, for vLLM's `worker_cls`."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_worker import Worker

from inference_svc.taps.vllm.worker import TappedWorker


class TappedGpuWorker(TappedWorker, Worker):
    """vLLM's GPU worker with taps."""

    def determine_available_memory(self) -> int:
        """Return the memory that vLLM measures, less what the signs of random projections may take later.

        The signs' memory is allocated while vLLM measures, so the KV cache leaves it free.
        """
        room = self._residuum.path.room_for_signs()
        try:
            available: int = super().determine_available_memory()
            return available
        finally:
            del room
            torch.cuda.empty_cache()
