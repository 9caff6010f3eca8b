"""Engine configurations that the taps refuse at startup, because captured rows would be wrong."""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.platforms import current_platform

from inference_svc.taps.errors import UnsupportedEngineError

_KEEP_BY_TOKENS = ("ExampleConnector", "HF3FSKVConnector", "LMCacheConnectorV1")
"""KV connectors of vLLM that find stored KV by its tokens alone: they know neither `cache_salt` nor LoRA adapters.
Others use the hashes of vLLM's prefix cache, which the salt is part of, or move the KV of a single request."""


def refuse_unsupported(config: Any) -> None:
    """Check vLLM's configuration.

    Args:
        config: A `VllmConfig`.

    Raises:
        UnsupportedEngineError: It enables a feature with which rows would be missing, duplicated, or of other tokens.
    """
    passes = config.compilation_config.pass_config
    recomputes = getattr(config.kv_transfer_config, "kv_load_failure_policy", "") == "recompute"
    features = {
        "speculative decoding: it computes rows of tokens that are then rejected": config.speculative_config,
        # vLLM 0.24 has this pass, 0.32 does not.
        "sequence parallelism: no rank holds whole rows": getattr(passes, "enable_sp", False),
        "dual batch overlap: a step's rows are in two batches": config.parallel_config.use_ubatching,
        "kv_sharing_fast_prefill: later layers compute no rows of prompts": config.cache_config.kv_sharing_fast_prefill,
        "kv_load_failure_policy=recompute: it computes rows twice, first from KV that was not loaded": recomputes,
    }
    refused = [feature for feature, is_enabled in features.items() if is_enabled]
    refused += [
        f"the KV connector {name}: it keeps KV by its tokens alone, so requests would read what others have steered"
        for name in _connectors(config.kv_transfer_config)
        if name in _KEEP_BY_TOKENS
    ]
    if refused:
        raise UnsupportedEngineError(
            f"residuum does not serve {'; nor '.join(refused)}. Remove these options from the engine's arguments."
        )
    if envs.VLLM_BATCH_INVARIANT and current_platform.is_cpu():
        raise UnsupportedEngineError(
            "VLLM_BATCH_INVARIANT is 1, but vLLM has no batch-invariant kernels for a CPU. Unset it, or use a GPU."
        )


def _connectors(transfer: Any) -> list[str]:
    """Return the names of the KV connectors of a `KVTransferConfig`: several, if a MultiConnector joins them."""
    if transfer is None:
        return []
    joined = transfer.kv_connector_extra_config.get("connectors", [])
    return [transfer.kv_connector, *(item.get("kv_connector") for item in joined)]
