"""One process of a benchmark: `python -m bench.child MODULE JOB.json RESULT.json`, started by `bench.processes`."""

from __future__ import annotations

import importlib
import sys

from inference_svc import mp_main
from svc_common.memory import importing

if __name__ == "__main__":
    __spec__ = mp_main.__spec__  # as in the service: the processes that vLLM spawns start from this module
    with importing():
        module = importlib.import_module(sys.argv.pop(1))
    module.main()
