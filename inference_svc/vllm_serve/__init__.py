"""The taps inside plain `vllm serve`: a worker class, and a plugin for its API server.

    vllm serve MODEL --worker-cls inference_svc.vllm_serve.Worker

docs/vllm-serve.md is the guide for users. The worker is that of the inference service. The front end here runs inside
vLLM's API server and does what the process of the inference service does otherwise.
"""

from __future__ import annotations

from typing import Any

WORKER = f"{__name__}.Worker"
"""The value for `--worker-cls`. The plugin recognizes a tapped engine by it, and leaves all other engines unchanged."""


SPEC_KEY = "residuum"
"""The key in `vllm_xargs` of the request's spec."""

VECTORS_KEY = "residuum_vectors"
"""The key in `vllm_xargs` of the request's vectors."""


def __getattr__(name: str) -> Any:
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported only in workers, because importing vLLM's CPU worker replaces parts of torch.cuda.
    from inference_svc.vllm_serve.worker import worker_class

    return worker_class()
