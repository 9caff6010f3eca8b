"""Real services for this folder: one engine with SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import residuum
from svc_common.launcher import Service, running_services
from tests import one_process, sharing, warm_start

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests in one process, which has the engine."""
    sharing.check(items, "services", "integration", Path(__file__).parent)


@pytest.fixture(scope="package")
def services(smollm2: Path) -> Iterator[tuple[Service, Service]]:
    """(store, inference): the shared engine, SmolLM2 in bfloat16, eager, nine sites enabled. Both export metrics."""
    figures = ["--metrics", "127.0.0.1:0"]
    saes = ["--sae-mib", "32"]
    sites = ["--capture-sites", "resid_post,resid_pre,attn_out,mlp_in,mlp_out,q,k,z,mlp_act"]
    with running_services(
        str(smollm2),
        inference_arguments=["--enforce-eager", *one_process.SMALL, *sites, *saes, *figures],
        store_arguments=figures,
        launch=warm_start.launch,
    ) as both:
        yield both


@pytest.fixture(scope="package")
def client(services: tuple[Service, Service]) -> Iterator[residuum.Client]:
    """A client of the shared engine."""
    with residuum.Client(services[1].endpoint) as opened:
        yield opened
