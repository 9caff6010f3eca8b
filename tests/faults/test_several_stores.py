"""One of several stores fails, which affects only its own captures."""

from __future__ import annotations

import numpy as np
import pytest

from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.placement import first_rank
from tests.faults.support import BLOCK, COMPLETE, INCOMPLETE, LAYERS, Capture, Ring, Shippers, Store
from tests.waiting import wait_for

NAMES = ("a", "b", "c")
RING_BYTES = 768 << 10


@pytest.fixture
def stores(tmp_path):
    running = {}
    for name in NAMES:
        (tmp_path / name).mkdir()
        running[name] = Store(tmp_path / name)
    yield running
    for store in running.values():
        store.close()


@pytest.fixture
def ring(control_path):
    with_parts = Ring(control_path, ring_bytes=RING_BYTES, stores=NAMES)
    with_parts.start()
    yield with_parts
    with_parts.close()


@pytest.fixture
def start_shippers(control_path, stores, monkeypatch):
    started = []

    def start(count, *arguments):
        addresses = [f"{name}={store.endpoint}" for name, store in stores.items()]
        started.append(Shippers(control_path, addresses, count, *arguments))
        return started[-1]

    yield start
    for shippers in started:
        shippers.stop()


def captures_of(store, count, blocks=8):
    """Return captures that are placed in a store."""
    names = (f"{store}-{at}" for at in range(1 << 20))
    own = (name for name in names if first_rank(NAMES, name) == store)
    return [Capture(next(own), length=blocks * BLOCK) for _ in range(count)]


def publish(ring, *captures):
    """Publish all blocks, one of each capture in turn."""
    for blocks in zip(*(capture.blocks() for capture in captures), strict=True):
        for capture, block in zip(captures, blocks, strict=True):
            ring.publish_rows(capture, block)


def shed_or_publish(ring, capture):
    """Publish what fits, as the policy SHED does. Return the dropped blocks."""
    shed = []
    for block in capture.blocks():
        header = capture.header(block)
        payload = capture.values(LAYERS, block).tobytes()
        extent = ring.acquire(len(payload), False, capture.name)
        if extent is None:
            shed.append(block)
            continue
        ring.view(extent)[:] = np.frombuffer(payload, np.uint8)
        ring.publish(extent, capture.name, [header])
    return shed


@pytest.mark.parametrize("shippers", [1, 2])
def test_a_store_that_is_killed_in_mid_stream_touches_only_its_captures(stores, ring, start_shippers, shippers):
    """During the outage, captures in other stores end COMPLETE; its own do afterwards. No row is lost or duplicated."""
    start_shippers(shippers)
    own = captures_of("b", 2, blocks=4)
    before = {name: captures_of(name, 1, blocks=4)[0] for name in "ac"}
    for capture in own:
        stores["b"].open(capture)
    for name, capture in before.items():
        stores[name].open(capture)
    publish(ring, *before.values(), own[0])
    assert ring.wait_for_acks(1) or ring.num_acked
    stores["b"].kill()
    publish(ring, own[1])  # fits b's share of the ring
    later = {name: captures_of(name, 4, blocks=16)[1:] for name in "ac"}
    for name, captures in later.items():
        for capture in captures:
            stores[name].open(capture)
        publish(ring, *captures)  # several times the ring: the ring continues although b's share is occupied
    for name in "ac":
        for capture in [before[name], *later[name]]:
            stores[name].seal_and_check(capture)
    stores["b"].start()
    for capture in own:
        stores["b"].seal_and_check(capture)
    assert ring.drain(60)


def test_an_unreachable_store_sheds_only_blocks_of_its_captures(stores, ring, start_shippers):
    start_shippers(1)
    lost = captures_of("b", 1, blocks=40)[0]
    stores["b"].open(lost)
    stores["b"].kill()
    shed = shed_or_publish(ring, lost)
    block_bytes = len(LAYERS) * BLOCK * lost.width * 4
    kept = 40 - len(shed)
    assert kept == (RING_BYTES // 6 + RING_BYTES // 2) // block_bytes, "its reserve and the common half are full"
    for name in "ac":
        capture = captures_of(name, 1, blocks=64)[0]
        stores[name].open(capture)
        publish(ring, capture)  # waits only for its own store
        stores[name].seal_and_check(capture)
    for block in shed:
        ring.report_loss(lost.name, _loss(lost, block))
    stores["b"].start()
    stores["b"].seal(lost)
    manifest = stores["b"].manifest(lost, wait=True)
    assert manifest.state == INCOMPLETE
    assert manifest.num_rows == kept * BLOCK * len(LAYERS)
    healthy = captures_of("b", 2, blocks=8)[1]
    stores["b"].open(healthy)
    publish(ring, healthy)
    stores["b"].seal(healthy)
    assert stores["b"].manifest(healthy, wait=True).state == COMPLETE


def test_a_shipper_that_stops_delivers_to_the_stores_that_answer(stores, ring, start_shippers):
    """It leaves the other store's rows to the next shipper."""
    shippers = start_shippers(1, "--grace", "2")
    wait_for(lambda: ring.stats().connected_shippers, "the shipper is there")
    alive, dead = captures_of("a", 1)[0], captures_of("b", 1)[0]
    for name, capture in (("a", alive), ("b", dead)):
        stores[name].open(capture)
    stores["b"].kill()
    publish(ring, alive, dead)
    stores["a"].seal(alive)
    shippers.stop()
    assert stores["a"].manifest(alive, wait=True).state == COMPLETE
    wait_for(lambda: not ring.stats().connected_shippers, "the shipper has gone")
    assert ring.acked(dead) == set()
    stores["b"].start()
    start_shippers(1)
    stores["b"].seal_and_check(dead)


def _loss(capture, block):
    return store_pb2.RowLoss(
        sites=[capture_pb2.SITE_RESID_POST], layers=LAYERS, positions=block,
        reason=capture_pb2.INCOMPLETE_REASON_OVERFLOW, detail="shed",
    )  # fmt: skip
