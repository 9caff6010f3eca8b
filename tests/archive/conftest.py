"""An S3 server for the whole run, and a proxy in front of it for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.archive.s3 import BUCKET, Proxy, S3Server
from tests.store.support import Process


@pytest.fixture(autouse=True)
def _plain_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let restores in this process leave its logs as they are: other tests read them."""
    monkeypatch.setattr("store_svc.archive.restore.configure_logs", lambda _: None)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy to an S3 server with an empty bucket. The environment has what a store needs to use it."""
    s3_server.empty()
    proxy = Proxy(s3_server.port)
    for name, value in proxy.environment.items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


@pytest.fixture
def url(s3: Proxy) -> str:
    return f"s3://{BUCKET}/some/prefix"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts store processes one after another, all with the same folder."""
    processes: list[Process] = []

    def start(*flags: str) -> Process:
        processes.append(Process(tmp_path / "store", "--shards", "1", *flags))
        return processes[-1]

    yield start
    for item in processes:
        item.process.kill()
        item.process.wait()
        item.client.close()
