"""The real store service in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc

from residuum.rpc.channels import open_channel
from tests import ports
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]


class RunningStore:
    """`python -m store_svc`. It may be started again on the same port."""

    def __init__(self, folder: Path, port: int = 0, max_bytes: str = "64MiB") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port_file = folder / "port"
        port_file.unlink(missing_ok=True)
        listen = f"127.0.0.1:{port or ports.reserve()}"
        command = [sys.executable, "-m", "store_svc", "--listen", listen]
        command += ["--port-file", str(port_file), "--path", str(folder / "db"), "--log-level", "warning"]
        command += ["--seal-timeout-seconds", "5", "--max-bytes", max_bytes]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'client'}:{ROOT}"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment)
        self.port = self._port(port_file)
        self.endpoint = f"127.0.0.1:{self.port}"
        with open_channel(self.endpoint) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)

    def _port(self, file: Path) -> int:
        def is_written() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the store ended with {self.process.returncode}")
            return file.exists() and bool(file.read_text().strip())

        try:
            wait_for(is_written, f"the store writes {file}")
        except AssertionError:
            self.process.kill()
            raise
        return int(file.read_text())

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(60)
