"""What a process that vLLM spawns runs first; see `inference_svc.__main__` and `bench.child`."""

from __future__ import annotations

from svc_common.memory import importing

if __name__ == "__mp_main__":
    with importing():  # it would do so anyway, and take longer
        import vllm.v1.engine.async_llm  # noqa: F401
