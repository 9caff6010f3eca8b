"""A real store in its own process, a scripted inference service, and both clients behind one face."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import residuum
from residuum.rpc.channels import open_channel

sys.path.insert(0, str(Path(__file__).parent))  # tests are no packages; this folder's helpers are plain modules

from peer import RunningPeer

ROOT = Path(__file__).parents[2]


class RunningStore:
    """`python -m store_svc` on a free port."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port_file = folder / "port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "store_svc", "--listen", f"127.0.0.1:{port}"]
        command += ["--port-file", str(port_file), "--path", str(folder / "db"), "--log-level", "warning"]
        command += ["--seal-timeout-seconds", "5", "--max-bytes", "64MiB"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'client'}:{ROOT}"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment)
        self.port = self._port(port_file)
        self.endpoint = f"127.0.0.1:{self.port}"
        with open_channel(self.endpoint) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)

    def _port(self, file: Path) -> int:
        while not (file.exists() and file.read_text().strip()):
            try:  # waits for the process, and so either notices its end or looks again
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"the store ended with {self.process.returncode}")
        return int(file.read_text())

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(30)


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    running = RunningStore(tmp_path_factory.mktemp("store"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def running_peer(store):
    running = RunningPeer(store.endpoint)
    yield running
    running.stop()


@pytest.fixture
def peer(running_peer):
    """The scripted inference service, as if it were new."""
    running_peer.servicer.reset()
    yield running_peer.servicer
    for thread in running_peer.servicer.sealers:
        thread.join()


@pytest.fixture
def endpoint(running_peer, peer):
    return running_peer.endpoint


class Face:
    """Either client, used in the same words: calls are awaited if need be, async iterators become lists."""

    def __init__(self, client) -> None:
        self.client = client

    def __getattr__(self, name):
        method = getattr(self.client, name)

        async def call(*args, **kwargs):
            result = method(*args, **kwargs)
            if inspect.isawaitable(result):
                return await result
            if hasattr(result, "__anext__"):
                return [item async for item in result]
            return list(result) if hasattr(result, "__next__") else result

        return call


@pytest.fixture(params=["sync", "async"])
def kind(request):
    return {"sync": residuum.Client, "async": residuum.AsyncClient}[request.param]


@pytest.fixture
async def make(kind):
    """Makes clients of either kind, and closes them."""
    made = []

    def make_one(*args, **kwargs):
        made.append(kind(*args, **kwargs))
        return Face(made[-1])

    yield make_one
    for client in made:
        closing = client.close()
        if inspect.isawaitable(closing):
            await closing


@pytest.fixture
def client(make, endpoint):
    return make(endpoint, timeout=10)
