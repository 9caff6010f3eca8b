"""Engines whose worker runs in the engine's own process, as vLLM does on a GPU.

On a CPU vLLM starts a process of its own for the worker. Importing vLLM there takes a third of the engine's start.
"""

from __future__ import annotations

import json

ENGINE_ARGS = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
FLAG = f"--engine-args={json.dumps(ENGINE_ARGS)}"
