"""The arguments that start vLLM's engine, and the environment that its workers inherit."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from inference_svc.engine.adapters import lora_arguments
from inference_svc.engine.worker_settings import LONGEST_STEP_SECONDS, taps_fingerprint, worker_settings
from inference_svc.taps.vllm.worker import SETTINGS_VARIABLE

if TYPE_CHECKING:
    from inference_svc.settings import InferenceSettings

_WORKERS = {
    "cpu": "inference_svc.taps.vllm.cpu_worker.TappedCpuWorker",
    "cuda": "inference_svc.taps.vllm.gpu_worker.TappedGpuWorker",
}

CPU_KV_CACHE_GIB = 2.0
"""The size of the KV cache on a CPU, if no setting says it. vLLM would take nine tenths of the machine's memory."""


def engine_arguments(settings: InferenceSettings) -> dict[str, Any]:
    """Return vLLM's arguments for the service's settings, without those that install the taps.

    An engine started with them differs from the service's engine only in the missing taps, and loads no LoRA adapters.

    Raises:
        AdapterError: A LoRA adapter cannot be read.
    """
    values: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "enforce_eager": settings.enforce_eager,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "seed": settings.seed,
        "disable_log_stats": True,
    }
    kv_cache_gib = settings.kv_cache_gib or (CPU_KV_CACHE_GIB if current_platform.is_cpu() else 0)
    if kv_cache_gib:
        values["kv_cache_memory_bytes"] = int(kv_cache_gib * (1 << 30))
    if settings.max_model_len:
        values["max_model_len"] = settings.max_model_len
    return {**values, **lora_arguments(settings.adapters), **settings.engine_args}


def prepare_environment(settings: InferenceSettings, control_dir: str, score_board: str = "") -> None:
    """Set the environment variables that vLLM's workers inherit from this process and read."""
    read = worker_settings(settings, control_dir, os.getpid(), score_board, settings.sae_mib << 20)
    os.environ[SETTINGS_VARIABLE] = json.dumps(read)
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(LONGEST_STEP_SECONDS))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # By default vLLM forks on a GPU. This process already has gRPC's threads: a lock that one of them holds at that
    # moment would stay locked for ever in the engine and in every rank.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def tapped_engine_args(settings: InferenceSettings) -> AsyncEngineArgs:
    """Return vLLM's arguments for the service's settings, including those that install the taps.

    Raises:
        RuntimeError: vLLM runs neither on a CPU nor on an NVIDIA GPU.
        AdapterError: A LoRA adapter cannot be read.
    """
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise RuntimeError(
            f"vLLM runs on {current_platform.device_name}, but residuum taps models only on CPUs and NVIDIA GPUs. "
            "Install the vLLM build for one of these."
        )
    return AsyncEngineArgs(
        **engine_arguments(settings),
        worker_cls=_WORKERS["cpu" if current_platform.is_cpu() else "cuda"],
        additional_config=taps_fingerprint(settings),
    )
