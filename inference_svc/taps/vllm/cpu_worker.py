"""The worker class for CPUs, for vLLM's `worker_cls`.

Import it only on a machine without a GPU: importing vLLM's CPU worker replaces parts of `torch.cuda`.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.v1.worker.cpu_worker import CPUWorker

from inference_svc.taps.vllm.runners import cpu_lora, cpu_seeds
from inference_svc.taps.vllm.worker import TappedWorker


class TappedCpuWorker(TappedWorker, CPUWorker):
    """vLLM's CPU worker with taps."""

    def load_model(self, **options: Any) -> None:
        """Load the model and put the taps into it, with the workarounds of `cpu_lora` and `cpu_seeds`."""
        if self.vllm_config.lora_config is not None:
            cpu_lora.attach(self.model_runner, vllm.__version__)
        super().load_model(**options)
        if not self.use_v2_model_runner:
            cpu_seeds.attach(self.model_runner, vllm.__version__)
