"""Real services for the whole run: one engine with SmolLM2, and one compiled, tiny and exact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import residuum
from examples.services import ROOT, Service, running_services
from tests.integration.tiny import make_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real language model, unpacked if it is not there yet."""
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "fetch_model.py")], check=True, capture_output=True, text=True
    )
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_llama(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama in float32."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama", smollm2)


@pytest.fixture(scope="session")
def services(smollm2: Path) -> Iterator[tuple[Service, Service]]:
    """(store, inference): the shared engine, SmolLM2 in bfloat16, eager."""
    with running_services(str(smollm2), inference_arguments=["--enforce-eager", "--max-model-len", "1024"]) as both:
        yield both


@pytest.fixture(scope="session")
def client(services: tuple[Service, Service]) -> Iterator[residuum.Client]:
    """A client of the shared engine."""
    with residuum.Client(services[1].endpoint) as opened:
        yield opened


@pytest.fixture(scope="session")
def exact_services(tiny_llama: Path) -> Iterator[tuple[Service, Service]]:
    """(store, inference): the tiny model in float32, compiled, with chunked prefill in small chunks."""
    arguments = [
        "--dtype",
        "float32",
        "--max-num-batched-tokens",
        "64",
        "--max-num-seqs",
        "16",
        "--kv-cache-gib",
        "0.25",
        "--ring-mib",
        "4",
    ]
    with running_services(str(tiny_llama), inference_arguments=arguments) as both:
        yield both


@pytest.fixture(scope="session")
def exact_client(exact_services: tuple[Service, Service]) -> Iterator[residuum.Client]:
    """A client of the tiny, exact model."""
    with residuum.Client(exact_services[1].endpoint) as opened:
        yield opened
