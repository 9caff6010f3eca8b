"""One engine at a time for the whole folder: first all tests with the compiled one, then all with the eager one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import residuum
from tests import sharing
from tests.conformance.engines import Engine, running_engine
from tests.reference.hf import Reference
from tests.reference.tiny import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests in one process, which has the engine."""
    sharing.check(items, "engine", "conformance", Path(__file__).parent)


@pytest.fixture(scope="package", params=["compiled", "eager"])
def engine(request: pytest.FixtureRequest, tiny_llama: Path, cache_root: Path) -> Iterator[Engine]:
    """Both services on the tiny model. A test that uses it runs twice: compiled and eager."""
    with running_engine(request.param, tiny_llama, cache_root.parent, cache_root, "--sae-mib=1") as running:
        yield running


@pytest.fixture(scope="package")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's cache of compiled graphs, empty at the start. What vLLM knows of its models' classes is there already.

    Otherwise vLLM would start a process and import itself in it, to find out.
    """
    root = tmp_path_factory.mktemp("conformance") / "vllm-cache"
    known = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "vllm", "modelinfos")
    known.mkdir(parents=True, exist_ok=True)
    root.mkdir()
    (root / known.name).symlink_to(known)
    return root


@pytest.fixture(scope="package")
def reference(tiny_llama: Path) -> Reference:
    """The same model, run by transformers."""
    torch.set_num_threads(1)  # the model is tiny, and the engine uses the other cores
    return Reference(tiny_llama)


@pytest.fixture(scope="package")
def direction() -> residuum.Vector:
    """A vector for steering."""
    return residuum.Vector.from_array(np.random.default_rng(4).standard_normal(HIDDEN).astype(np.float32))
