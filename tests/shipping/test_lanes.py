"""The lane, and the reserve of the ring, that a capture uses."""

from __future__ import annotations

import pytest

from inference_svc.shipping.shipper.lanes import Lanes
from inference_svc.shipping.shipper.parcels import loss_parcels
from residuum.rpc.credentials import Credentials
from residuum.v1 import store_pb2
from residuum.wire.placement import first_rank, parse_stores
from residuum.wire.tokens import tenant_path

NAMES = ("a", "b", "c")
IDS = [f"x-{at}" for at in range(30)]


@pytest.mark.parametrize("tenant", ["", "alice"])
def test_rows_go_to_the_store_of_their_capture_id(tenant):
    lanes = Lanes(parse_stores([f"{name}=127.0.0.1:{at}" for at, name in enumerate(NAMES, 1)]), 1, Credentials())
    for name in IDS:
        path = tenant_path(tenant, name)
        lanes.put(path, loss_parcels(path, store_pb2.RowLoss(), lambda: None))
    waiting = {lane.store.name: lane.outbox.abandon() for lane in lanes}
    assert waiting == {store: sum(first_rank(NAMES, name) == store for name in IDS) for store in NAMES}
    assert all(waiting.values())


@pytest.mark.parametrize("tenant", ["", "alice"])
def test_an_extent_comes_from_the_reserve_of_the_captures_store(start_producer, tenant):
    producer = start_producer(1 << 20, stores=NAMES)
    for name in IDS:
        before = producer._allotment.used
        producer.acquire(1000, False, tenant_path(tenant, name))
        store = first_rank(NAMES, name)
        assert producer._allotment.used == {**before, store: before[store] + 1024}
    assert producer._figures()["store_bytes_used:a"] == producer._allotment.used["a"] > 0
    with pytest.raises(ValueError, match="name the capture"):
        producer.acquire(1000, block=False)
