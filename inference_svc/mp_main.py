"""The module that each process spawned by vLLM runs first; see `inference_svc.__main__` and `bench.child`."""

from __future__ import annotations

from svc_common.memory import importing

if __name__ == "__mp_main__":
    with importing():  # the process imports vLLM anyway; `importing` makes that faster
        import vllm.v1.engine.async_llm  # noqa: F401
