"""The end of the service's process."""

from __future__ import annotations

import subprocess
import sys

from tests.shipping.support import ENVIRONMENT

# The service's program with a server that cannot start. Something in its modules would print when Python frees it.
PROGRAM = """
import atexit, sys, types
from inference_svc import __main__ as program

class Freed:
    def __del__(self):
        print("freed")

class Server:
    def __init__(self, *_):
        pass

    async def run(self):
        raise SystemExit("the port is taken")

sys.modules["inference_svc.server"] = types.SimpleNamespace(InferenceServer=Server, kept=Freed())
sys.argv[1:] = ["--model", "x", "--store", "127.0.0.1:1"]
atexit.register(print, "ended")
program.main()
"""


def test_a_failed_start_ends_with_its_reason_and_without_what_modules_print_when_they_are_freed():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr, done.stdout) == (1, "the port is taken\n", "ended\n")
