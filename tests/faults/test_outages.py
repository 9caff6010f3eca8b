"""In an outage of the store, the model continues until the ring is full. Then it waits (WAIT) or drops rows (SHED)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import torch

from inference_svc.taps import plan
from inference_svc.taps.blocks import Block, BlockPool
from inference_svc.taps.sink import BlockSink, ModelRows
from residuum.v1 import capture_pb2, selection_pb2, tensor_pb2
from tests.faults.support import (
    BLOCK,
    COMPLETE,
    DEADLINE,
    INCOMPLETE,
    LAYERS,
    Capture,
    Ring,
    Row,
    Shippers,
    Store,
    named_rows,
    present_rows,
)
from tests.waiting import wait_for

OUTAGE_SECONDS = float(os.environ.get("OUTAGE_SECONDS", "2"))
"""The least duration of an outage in seconds. Shippers retry at least every 5 s, and faster at first."""

BLOCK_BYTES = len(LAYERS) * BLOCK * 64 * 4
RING_BLOCKS = 8
FULL = (RING_BLOCKS - 1, RING_BLOCKS)
"""Blocks in a full ring, or one fewer if earlier rows split the free space."""


class Model:
    """The worker's sink in front of the ring, fed one full block at a time, as by the capture points."""

    def __init__(self, ring: Ring, capture: Capture, *, sheds: bool) -> None:
        self.sent = 0
        """Blocks that have left the pool, into the ring or dropped."""
        everything = selection_pb2.PositionSelection()
        self._plan = plan.Capture(capture.name, 0, LAYERS, everything, sheds=sheds)
        self._capture = capture
        self._pool = BlockPool(len(LAYERS) * BLOCK, capture.width, torch.float32, torch.device("cpu"), 0)
        self._sink = BlockSink(self._pool, ModelRows(capture.width, tensor_pb2.DATA_TYPE_FLOAT32), ring)

    def compute(self, blocks: Sequence[range]) -> None:
        for positions in blocks:
            block = self._pool.take(self._plan, 1)
            self._fill(block, positions)
            self._sink.send([block])
            self.sent += 1

    def _fill(self, block: Block, positions: range) -> None:
        block.positions.extend(positions)
        rows = torch.from_numpy(self._capture.values(LAYERS, positions).view("<f4"))
        self._pool.rows(block).copy_(rows)


def stay_away(store: Store, while_away: Callable[[], bool]) -> None:
    """Keep the store down for the outage, checking a condition all the time."""
    ended = threading.Event()
    for _ in range(10):
        ended.wait(OUTAGE_SECONDS / 10)
        assert while_away()
    store.start()


def test_the_model_waits_for_the_store_and_continues(
    start_store: Callable[..., Store], start_ring: Callable[..., Ring], start_shippers: Callable[..., Shippers]
) -> None:
    store, ring = start_store(), start_ring(ring_bytes=RING_BLOCKS * BLOCK_BYTES)
    start_shippers(store.endpoint)
    capture = Capture("waits", 32 * BLOCK)
    store.open(capture)
    blocks = list(capture.blocks())
    model = Model(ring, capture, sheds=False)
    model.compute(blocks[:4])
    assert ring.drain(DEADLINE)
    store.kill()
    step = threading.Thread(target=model.compute, args=(blocks[4:],))
    step.start()
    wait_for(lambda: ring.stats().waits, "a full ring")
    assert model.sent - 4 in FULL, "the model continues until the ring is full"
    stay_away(store, lambda: model.sent - 4 in FULL and step.is_alive())
    step.join(DEADLINE)
    assert model.sent == len(blocks)
    assert ring.stats().losses == 0
    store.seal_and_check(capture)


def test_rows_are_shed_and_named_and_later_ones_are_kept(
    start_store: Callable[..., Store], start_ring: Callable[..., Ring], start_shippers: Callable[..., Shippers]
) -> None:
    store, ring = start_store(), start_ring(ring_bytes=RING_BLOCKS * BLOCK_BYTES)
    start_shippers(store.endpoint)
    during, after = Capture("sheds", 32 * BLOCK), Capture("after", 4 * BLOCK)
    store.open(during)
    blocks = list(during.blocks())
    model = Model(ring, during, sheds=True)
    model.compute(blocks[:4])
    assert ring.drain(DEADLINE)
    store.kill()
    step = threading.Thread(target=model.compute, args=(blocks[4:],))
    step.start()
    step.join(DEADLINE)
    assert model.sent == len(blocks), "it never waits"
    assert ring.stats().waits == 0
    assert len(blocks) - 4 - ring.stats().losses in FULL, "the rows that fit the ring are kept"
    stay_away(store, lambda: ring.stats().freed == 4)
    assert ring.drain(DEADLINE), "the ring is empty again, and the losses are reported"

    store.seal(during)
    manifest = store.manifest(during, wait=True)
    assert manifest.state == INCOMPLETE
    assert manifest.incomplete_reason == capture_pb2.INCOMPLETE_REASON_OVERFLOW
    kept = rows_of(blocks[:4]) | ring.acked(during)
    assert present_rows(manifest) == kept
    assert named_rows(manifest.missing) == during.rows() - kept
    found = store.read(during)
    assert (set(found.times), found.doubled, found.wrong) == (kept, 0, 0)

    store.open(after)
    Model(ring, after, sheds=True).compute(list(after.blocks()))
    store.seal_and_check(after)
    assert store.manifest(after).state == COMPLETE


def rows_of(blocks: Sequence[range]) -> set[Row]:
    return {(layer, position) for layer in LAYERS for positions in blocks for position in positions}
