"""A short soak of the shared engine: what a request leaves behind in the service, its shippers and the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.service.soak import soak

if TYPE_CHECKING:
    from examples.services import Service

pytestmark = pytest.mark.engine

REQUESTS = 90
MOST_MIB = 24.0
"""What all of them together may leave; the rows that they capture are several times as much, in each process that they
pass. What a single one leaves takes a longer run to see: `python -m bench.service.soak`."""


async def test_a_short_soak_leaves_little_behind(services: tuple[Service, Service]) -> None:
    part = await soak(*services, REQUESTS, 18, texts=True)
    assert sum(part["made"].values()) == REQUESTS
    assert set(part["made"].values()) == {REQUESTS // 9}
    # Not the engine: the blocks of its KV cache take turns, and most of its 2 GiB were never touched before.
    for name in ("service", "shipper", "store"):
        own = part["processes"][name]["own_mib"]
        assert own[-1] - own[1] < MOST_MIB, (name, own)
