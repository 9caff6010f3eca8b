"""Runs a real `vllm serve` with taps, and a real store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from svc_common.launcher import OWN_GROUP
from tests import ports, warm_start
from tests.one_process import ENGINE_ARGS

if TYPE_CHECKING:
    from collections.abc import Iterator

RESIDUUM = Path(sys.executable).with_name("residuum")
ROOT = Path(__file__).resolve().parents[2]

START_SECONDS = 240

ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # compiling the rank counts of logprobs takes longer than all tests
}


class Server:
    """A `vllm serve` in a separate process."""

    def __init__(self, process: subprocess.Popen[bytes] | warm_start.Process, port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_serving(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self.process.poll() is None, f"vllm serve has ended:\n{self.log_end()}"
            assert time.monotonic() < deadline, f"vllm serve was not ready in time:\n{self.log_end()}"
            time.sleep(0.2)

    def _answers(self) -> bool:
        with (
            suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer,
        ):
            return answer.status == 200
        return False

    def log_end(self) -> str:
        """Return the last lines of the log, and before them all that name an error: the first one is the cause."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines[:-60] if "Error: " in line] + lines[-60:])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            with suppress(ProcessLookupError):  # kill the rest of its process group
                os.killpg(self.process.pid, signal.SIGKILL)


def start_server(folder: Path, model: Path, *arguments: str, fork: bool = False, **environment: str) -> Server:
    """Start `vllm serve`, without waiting until it is ready.

    Args:
        folder: The folder for its log and temporary files.
        model: The model's folder.
        arguments: More of its arguments.
        fork: Start a fork of a process that has imported vLLM; see `tests.warm_start`.
        environment: More environment variables.
    """
    port = ports.reserve()  # vLLM imports for half a minute before it listens
    command = [
        "vllm-serve",
        str(model),
        "--served-model-name=smollm2",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=float32",
        "--enforce-eager",
        "--enable-scale-out",
        f"--distributed-executor-backend={ENGINE_ARGS['distributed_executor_backend']}",
        "--max-model-len=512",
        "--max-num-seqs=16",
        "--max-num-batched-tokens=512",
        f"--kv-cache-memory-bytes={1 << 29}",
        *arguments,
    ]
    log = folder / "vllm.log"
    environment = {**ALWAYS, "TMPDIR": str(folder), **environment}
    if fork:
        log.touch()
        with patch.dict(os.environ, environment):
            return Server(warm_start.launch("residuum", command, ROOT, log), port, log)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [str(RESIDUUM), *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            **OWN_GROUP,
        )
    return Server(process, port, log)


@contextmanager
def running_server(
    folder: Path, model: Path, *arguments: str, fork: bool = False, **environment: str
) -> Iterator[Server]:
    """Run `vllm serve` for as long as the context lasts."""
    server = start_server(folder, model, *arguments, fork=fork, **environment)
    try:
        server.wait_until_serving()
        yield server
    finally:
        server.stop()
