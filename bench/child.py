"""One process of a benchmark: `python -m bench.child MODULE JOB.json RESULT.json`, started by `bench.processes`."""

from __future__ import annotations

import importlib
import sys

from inference_svc import spawned
from residuum.rpc.memory import importing

if __name__ == "__main__":
    __spec__ = spawned.__spec__  # as the service does: what processes that vLLM spawns begin with
    with importing():
        module = importlib.import_module(sys.argv.pop(1))
    module.main()
