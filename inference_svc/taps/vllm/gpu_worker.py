"""The worker class for GPUs, for vLLM's `worker_cls`.

vLLM measures how much device memory it leaves for the KV cache. vLLM 0.32 counts all that is missing on the device by
then. Versions up to 0.24 count the model's memory, as the model runner reports it, and what the model allocates while
vLLM measures. So this worker allocates the taps' memory before, and also adds it to the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from inference_svc.taps.vllm.worker import TappedWorker


class TappedGpuWorker(TappedWorker, Worker):
    """vLLM's GPU worker with taps."""

    def load_model(self, **options: Any) -> None:
        """Load the model, put the taps into it, and count their memory as the model's."""
        super().load_model(**options)
        self.model_runner.model_memory_usage += self._residuum.device_bytes

    def determine_available_memory(self) -> int:
        """Return the memory that vLLM measures, less what encoding rows may take later.

        Their memory is allocated while vLLM measures, so the KV cache leaves it free.
        """
        room = self._residuum.path.room_for_encoding()
        size = 0 if room is None else room.nbytes
        self.model_runner.model_memory_usage += size
        try:
            available: int = super().determine_available_memory()
            return available
        finally:
            self.model_runner.model_memory_usage -= size
            del room
            torch.cuda.empty_cache()
