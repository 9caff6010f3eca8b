"""One process of a benchmark: `python -m bench.child MODULE JOB.json RESULT.json`, started by `bench.children`."""

from __future__ import annotations

import importlib
import sys

from residuum.rpc.memory import importing

if __name__ == "__main__":
    with importing():
        module = importlib.import_module(sys.argv.pop(1))
    module.main()
elif __name__ == "__mp_main__":
    # As in `inference_svc.spawned`.
    with importing():
        import vllm.v1.engine.async_llm  # noqa: F401
