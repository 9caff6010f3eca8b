from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.support import Client, Process, serving


@pytest.fixture(autouse=True)
def shards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many shards new databases have: one, or what a test asks for with `parametrize(..., indirect=True)`."""
    count = int(getattr(request, "param", 1))
    monkeypatch.setenv("RESIDUUM_SHARDS", str(count))
    return count


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(tmp_path / "store") as (_, client):
        yield client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts store processes one after another, all with the same folder."""
    processes: list[Process] = []

    def start(*flags: str) -> Process:
        processes.append(Process(tmp_path / "store", *flags))
        return processes[-1]

    yield start
    for item in processes:
        item.process.kill()
        item.process.wait()
        item.client.close()
