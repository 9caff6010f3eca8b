"""The taps inside plain `vllm serve`: a worker class, and a plugin for its API server.

    vllm serve MODEL --worker-cls inference_svc.vllm_serve.Worker

docs/vllm-serve.md tells users how. The worker is the inference service's; what that service's own process does, the
front end here does inside vLLM's API server.
"""

from __future__ import annotations

from typing import Any

WORKER = f"{__name__}.Worker"
"""What users name in `--worker-cls`. It is how an engine is known to be ours: the plugin leaves all others alone."""


SPEC_KEY = "residuum"
"""The name in `vllm_xargs` under which a request says what it asks for."""

VECTORS_KEY = "residuum_vectors"
"""The name under which its vectors come."""


def __getattr__(name: str) -> Any:
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only in workers: importing vLLM's CPU worker replaces parts of torch.cuda.
    from inference_svc.vllm_serve.worker import worker_class

    return worker_class()
