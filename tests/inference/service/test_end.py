"""The end of the service's process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


# A service that gets SIGTERM while it imports its server.
STOPPED_EARLY = """
import os, runpy, signal, sys, time

class Importing:
    def find_spec(self, name, path, target=None):
        if name == f"{module}.server":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

module = sys.argv[1]
sys.meta_path.insert(0, Importing())
sys.argv[1:] = ["--model", "x", "--listen", "127.0.0.1:0"]
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize("module", ["inference_svc", "store_svc"])
def test_sigterm_ends_a_service_that_is_still_importing(module):
    """A handler is needed: without one, Linux ignores the signal in the first process of a container."""
    command = [sys.executable, "-c", STOPPED_EARLY, module]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow  # it imports vLLM
def test_sigterm_ends_a_service_that_waits_for_the_models_hub(tmp_path):
    """vLLM asks the hub in a thread, which a signal does not reach, and asks again several times."""
    with socket.create_server(("127.0.0.1", 0)) as hub, contextlib.ExitStack() as stack:
        hub.settimeout(120)
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        command = [sys.executable, "-m", "inference_svc", "--model", "nobody/nothing", "--listen", "127.0.0.1:0"]
        environment = {**os.environ, **ENVIRONMENT, "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
        process = stack.enter_context(
            subprocess.Popen(command, env={**environment, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"})
        )
        stack.callback(process.kill)
        asked, _ = hub.accept()  # and is silent
        stack.callback(asked.close)
        process.send_signal(signal.SIGTERM)
        assert process.wait(8) == 0, "a request to the hub alone takes 10 seconds"
    assert not list(Path(tmp_path).glob("residuum-*"))
