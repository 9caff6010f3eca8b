"""The first actions of a process that vLLM spawns."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from tests.shipping.support import ENVIRONMENT

# The service's program, as `python -m` runs it, until it reads its settings. At that point it spawns a process.
PROGRAM = """
import multiprocessing, runpy, sys
import svc_common.settings
from tests.inference.service.test_spawned import tell

def spawn(*_):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=tell, args=(answers,))
    process.start()
    print(answers.get(timeout=120))
    process.join()
    sys.exit()

svc_common.settings.load_settings = spawn
sys.argv[1:] = []
runpy.run_module("inference_svc", run_name="__main__", alter_sys=True)
"""


def tell(answers):
    """Report what this process has imported, and whether garbage collection skips it."""
    answers.put(("vllm.v1.engine.async_llm" in sys.modules, gc.get_freeze_count() > 100_000, gc.isenabled()))


@pytest.mark.slow
def test_a_spawned_process_imports_vllm_without_garbage_collection():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["(True, True, True)"], done.stderr
