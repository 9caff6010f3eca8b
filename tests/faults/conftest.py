"""Fixtures that start processes which tests make fail, and end them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.support import ENVIRONMENT, Ring, Shippers, Store


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children import what this process imports."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])


@pytest.fixture
def start_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Starts a store with these flags, in its own folder."""
    stores: list[Store] = []

    def start(*flags: str, folder: Path = tmp_path) -> Store:
        stores.append(Store(folder, *flags))
        return stores[-1]

    yield start
    for store in stores:
        store.close()


@pytest.fixture
def control_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c") / "ring"


@pytest.fixture
def start_ring(control_path: Path) -> Iterator[Callable[..., Ring]]:
    """Makes a worker's ring that records acknowledgements."""
    rings: list[Ring] = []

    def start(ring_bytes: int = 1 << 20) -> Ring:
        ring = Ring(control_path, ring_bytes=ring_bytes)
        rings.append(ring)
        ring.start()
        return ring

    yield start
    for ring in rings:
        ring.close()


@pytest.fixture
def start_shippers(control_path: Path) -> Iterator[Callable[..., Shippers]]:
    """Starts shippers under their supervisor; each gets these arguments."""
    started: list[Shippers] = []

    def start(endpoint: str, *arguments: str, count: int = 1) -> Shippers:
        started.append(Shippers(control_path, endpoint, count, *arguments))
        return started[-1]

    yield start
    for shippers in started:
        shippers.stop(grace_seconds=0.1)
