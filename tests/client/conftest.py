"""A real store in its own process, a scripted inference service, and both clients with one interface."""

from __future__ import annotations

import inspect
import time
from types import SimpleNamespace

import pytest

import residuum
from residuum.cli import main
from residuum.protocol import deadlines
from residuum.transport import connections
from tests.client.support.flaky_store import FlakyStore
from tests.client.support.peer import RunningPeer
from tests.client.support.running_store import RunningStore


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    running = RunningStore(tmp_path_factory.mktemp("store"))
    yield running
    running.stop()


@pytest.fixture
def flaky(store):
    """A proxy to the store with faults that a test scripts."""
    running = FlakyStore(store.endpoint)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def running_peer(store):
    running = RunningPeer(store.endpoint)
    yield running
    running.stop()


@pytest.fixture
def peer(running_peer):
    """The scripted inference service, reset for each test."""
    running_peer.servicer.reset()
    yield running_peer.servicer
    for thread in running_peer.servicer.sealers:
        thread.join()


@pytest.fixture
def endpoint(running_peer, peer):
    return running_peer.endpoint


class Face:
    """Either client with the same interface: calls are awaited if necessary, and async iterators become lists."""

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


class Clock:
    """The clock by which a client counts how long a service is away. It stands still unless a test moves it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """What a test adds to it."""
        self.speed = 0.0
        """Its seconds for each second that passes."""

    def monotonic(self) -> float:
        return self.seconds + self.speed * time.monotonic()


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock of deadlines and retries, so that a test depends neither on the machine nor on its load."""
    made = Clock()
    for module in (connections, deadlines):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def cli(endpoint, capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments, at=endpoint):
        code = main([arguments[0], "--endpoint", at, *map(str, arguments[1:])])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def captured(endpoint):
    with residuum.Client(endpoint) as client:
        reply = client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[1, 4]))
        client.manifest(reply.request_id, wait=True)
        return reply.request_id
