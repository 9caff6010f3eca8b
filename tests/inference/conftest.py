"""Fixtures: the service on a fake engine, with and without a store.

The fixtures import their modules themselves, because these load vLLM, which the tests of the taps do not need.
"""

from __future__ import annotations

import pytest

from residuum.v1 import store_pb2_grpc


@pytest.fixture
async def store():
    from tests.inference.service_support import FakeStore, listening

    servicer = FakeStore()
    async with listening(store_pb2_grpc.add_StoreServiceServicer_to_server, servicer) as servicer.endpoint:
        yield servicer


@pytest.fixture
async def service(store):
    from tests.inference.service_support import running_service

    async with running_service(store.endpoint) as running:
        yield running


@pytest.fixture
async def service_without_store():
    from tests.inference.service_support import running_service

    async with running_service() as running:
        yield running
