"""Engines whose worker runs in the engine's process, as on a GPU.

On a CPU, vLLM starts a separate process for the worker. Importing vLLM there takes a third of the engine's start.
"""

from __future__ import annotations

import json

ENGINE_ARGS = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
FLAG = f"--engine-args={json.dumps(ENGINE_ARGS)}"
SMALL = [FLAG, "--max-model-len=1024", "--kv-cache-gib=0.5"]
"""Arguments for a service of which several run at once on a small machine, with room for 20,000 tokens of SmolLM2."""
