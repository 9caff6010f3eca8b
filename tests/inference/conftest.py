"""Fixtures: the service on a fake engine, with and without a store."""

from __future__ import annotations

import pytest

from residuum.v1 import store_pb2_grpc
from tests.inference.service_support import FakeStore, listening, running_service


@pytest.fixture
async def store():
    servicer = FakeStore()
    async with listening(store_pb2_grpc.add_StoreServiceServicer_to_server, servicer) as servicer.endpoint:
        yield servicer


@pytest.fixture
async def service(store):
    async with running_service(store.endpoint) as running:
        yield running


@pytest.fixture
async def service_without_store():
    async with running_service() as running:
        yield running
