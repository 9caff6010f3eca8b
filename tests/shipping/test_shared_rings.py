"""Rows that a shipper leaves in the ring, with a real store: stored as if they had come in messages."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from contextlib import closing

import numpy as np
import pytest

from inference_svc.shipping.ring import Extent, SharedRing
from inference_svc.shipping.shipper import shared_rings
from inference_svc.shipping.shipper.control import ControlClient
from inference_svc.shipping.shipper.outbox import Outbox
from inference_svc.shipping.shipper.shared_rings import Rings
from inference_svc.shipping.shipper.uploader import Uploader
from residuum.v1 import store_pb2
from residuum.wire.limits import MAX_CHUNK_BYTES, TARGET_PLACED_CHUNK_BYTES
from residuum.wire.rows.shared_memory import MIN_PLACED_BYTES
from tests.faults.support import COMPLETE, LAYERS, Capture, Ring, collect
from tests.shipping.support import DEADLINE
from tests.store.support import describe, serving
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("shared_memory")

WIDTH, BLOCK = 256, 32
BLOCK_BYTES = len(LAYERS) * BLOCK * WIDTH * 4


@pytest.fixture
def running(tmp_path):
    with serving(tmp_path / "store", max_bytes="256MiB") as (store, client):
        yield store, client


@pytest.fixture
def ship(tmp_path):
    """Starts a shipper's threads between a ring and a store."""
    started = []

    def start(client, name="ring", ring_bytes=1 << 20, rings=None):
        ring = Ring(tmp_path / name, ring_bytes=ring_bytes)
        ring.start()
        outbox, rings = Outbox(64 << 20), rings or Rings()
        uploader = Uploader(client.target, outbox, rings=rings)
        control = ControlClient(tmp_path / name, lambda _, parcels: outbox.put(parcels), rings)
        uploader.start()
        control.start()
        started.append((ring, control, outbox, uploader))
        return ring, uploader

    yield start
    for ring, control, outbox, uploader in started:
        control.close()
        outbox.abandon()
        uploader.abandon()
        assert uploader.wait(DEADLINE)
        ring.close()


def open_capture(client, capture):
    client.open(describe(capture.name, layers=LAYERS, prompt=capture.length, width=capture.width))


def check(client, capture):
    """Seal: the capture must be complete, with every row once and as it was published."""
    assert client.seal(capture.name, generated=[1]).state == COMPLETE
    found = collect(capture, client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=capture.name)))
    assert (found.doubled, found.wrong) == (0, 0)
    assert set(found.times) == capture.rows()


def written(store):
    return store._metrics.shared_memory_write_bytes._value.get()


def publish(ring, capture, blocks=None):
    for block in blocks or capture.blocks():
        ring.publish_rows(capture, block)


def test_payloads_stay_in_the_ring_which_is_used_again(running, ship):
    store, client = running
    ring, uploader = ship(client)
    capture = Capture("a", 32 * BLOCK, WIDTH)  # four times the ring
    open_capture(client, capture)
    publish(ring, capture)
    assert ring.drain(DEADLINE)
    check(client, capture)
    assert written(store) == 32 * BLOCK_BYTES
    assert (uploader.num_streams, uploader.num_rejected) == (1, 0)


def test_small_payloads_and_losses_travel_in_messages(running, ship):
    store, client = running
    ring, _ = ship(client)
    small = Capture("small", 4 * BLOCK, 32)
    assert len(LAYERS) * BLOCK * 32 * 4 < MIN_PLACED_BYTES
    open_capture(client, small)
    publish(ring, small)
    assert ring.drain(DEADLINE)
    check(client, small)
    assert written(store) == 0


def test_several_rings_of_one_shipper(running, ship):
    store, client = running
    rings = Rings()
    captures = [Capture(name, 16 * BLOCK, WIDTH) for name in "ab"]
    for capture in captures:
        open_capture(client, capture)
        publish(ship(client, capture.name, rings=rings)[0], capture)
    for capture in captures:
        wait_for(lambda capture=capture: client.get(capture.name).num_rows == len(capture.rows()))
        check(client, capture)
    assert written(store) == 32 * BLOCK_BYTES


@pytest.mark.parametrize("is_placed", [True, False])
def test_large_blocks_travel_whole_in_the_ring_and_cut_in_messages(running, ship, monkeypatch, is_placed):
    store, client = running
    if not is_placed:
        monkeypatch.setattr(shared_rings.SharedRings, "_give", lambda *_: None)
    ring, uploader = ship(client, ring_bytes=32 << 20)
    large = Capture("large", 2 * BLOCK, 8192)
    block_bytes = len(LAYERS) * BLOCK * large.width * 4
    assert MAX_CHUNK_BYTES < block_bytes <= TARGET_PLACED_CHUNK_BYTES
    open_capture(client, large)
    publish(ring, large)
    assert ring.drain(DEADLINE)
    check(client, large)
    assert written(store) == (2 * block_bytes if is_placed else 0)
    assert uploader.num_settled == (2 if is_placed else 8)
    assert uploader.num_streams == 1


def test_small_payloads_between_do_not_make_large_ones_smaller(running, ship):
    _, client = running
    ring, uploader = ship(client, ring_bytes=32 << 20)
    large, small = Capture("large", 3 * BLOCK, 8192), Capture("small", 3 * BLOCK, 32)
    for capture in (large, small):
        open_capture(client, capture)
    for number in range(3):
        for capture in (large, small):
            publish(ring, capture, [list(capture.blocks())[number]])
            assert ring.drain(DEADLINE)
    for capture in (large, small):
        check(client, capture)
    assert uploader.num_settled == 6


def test_an_older_store_gets_small_chunks(running, ship, monkeypatch):
    store, client = running
    describe_store = shared_rings._describe

    def describe_older(channel):
        answer = describe_store(channel)
        answer.ClearField("max_placed_chunk_bytes")
        return answer

    monkeypatch.setattr(shared_rings, "_describe", describe_older)
    ring, uploader = ship(client, ring_bytes=32 << 20)
    large = Capture("large", 2 * BLOCK, 8192)
    open_capture(client, large)
    publish(ring, large)
    assert ring.drain(DEADLINE)
    check(client, large)
    assert written(store) == len(LAYERS) * 2 * BLOCK * large.width * 4
    assert uploader.num_settled == 8


@pytest.mark.parametrize("how", ["off in the store", "off in the environment", "no rings"])
def test_without_it_rows_travel_in_messages(tmp_path, ship, monkeypatch, how):
    if how == "off in the environment":
        monkeypatch.setenv("RESIDUUM_SHARED_MEMORY", "off")
    if how == "no rings":
        monkeypatch.setattr(Rings, "add", lambda *_: None)
    setting = {"off in the store": "off"}.get(how, "auto")
    with serving(tmp_path / "store", max_bytes="256MiB", shared_memory=setting) as (store, client):
        capture = Capture("a", 8 * BLOCK, WIDTH)
        open_capture(client, capture)
        ring, _ = ship(client)
        publish(ring, capture)
        assert ring.drain(DEADLINE)
        check(client, capture)
        assert written(store) == 0


def test_a_store_that_has_lost_the_memory_gets_the_rows_in_messages(running, ship, monkeypatch):
    """As after a restart between the handshake and a message, or when the store dropped the connection."""
    store, client = running
    monkeypatch.setattr(store._shared_memory.memories, "written", lambda _: None)
    ring, uploader = ship(client)
    capture = Capture("a", 16 * BLOCK, WIDTH)
    open_capture(client, capture)
    publish(ring, capture)
    assert ring.drain(DEADLINE)
    check(client, capture)
    assert (written(store), uploader.num_streams, uploader.num_rejected) == (0, 2, 0)


def test_a_payload_that_changes_before_the_store_copies_it_is_sent_again(running, ship, monkeypatch):
    """The checksum is of the copy. The worker never changes an extent so early; a defect could."""
    store, client = running
    ring, uploader = ship(client)
    capture = Capture("a", 8 * BLOCK, WIDTH)
    open_capture(client, capture)
    memories, spoiled = store._shared_memory.memories, threading.Event()
    plain = memories.written

    def spoil(key):
        memory = plain(key)
        if spoiled.is_set() or memory is None:
            return memory
        spoiled.set()
        return np.roll(memory, 1)

    monkeypatch.setattr(memories, "written", spoil)
    publish(ring, capture)
    assert ring.drain(DEADLINE)
    check(client, capture)
    assert spoiled.is_set()
    assert uploader.num_rejected == 1
    assert written(store) == 8 * BLOCK_BYTES, "the changed payload came through shared memory, then in a message"


def test_a_frozen_handshake_delays_but_loses_nothing(tmp_path, running, ship, monkeypatch):
    """A socket that accepts connections and never answers."""
    _, client = running
    monkeypatch.setattr("residuum.rpc.shared_memory._SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as frozen:
        frozen.bind(str(tmp_path / "s"))
        frozen.listen()
        monkeypatch.setattr(running[0]._shared_memory, "path", str(tmp_path / "s"))
        ring, _ = ship(client)
        capture = Capture("a", 8 * BLOCK, WIDTH)
        open_capture(client, capture)
        publish(ring, capture)
        assert ring.drain(DEADLINE)
        check(client, capture)


def test_the_store_does_not_keep_the_rings_of_ended_workers(running, ship, tmp_path):
    store, client = running
    rings = Rings()
    ring, uploader = ship(client, rings=rings)
    for name in "abc":
        capture = Capture(name, 2 * BLOCK, WIDTH)
        open_capture(client, capture)
        publish(ring, capture)
        assert ring.drain(DEADLINE)
        check(client, capture)
        ring.close()
        del ring
        wait_for(lambda: not rings._rings)
        ring = Ring(tmp_path / "ring", ring_bytes=1 << 20)
        ring.start()
    ring.close()
    assert written(store) == 6 * BLOCK_BYTES
    assert uploader.num_streams == 1
    wait_for(lambda: len(store._shared_memory.memories) == 1)


def test_a_ring_is_taken_back_only_when_no_payload_is_in_it(running):
    store, client = running
    rings, memories = Rings(), store._shared_memory.memories
    payloads = []
    with closing(shared_rings.SharedRings(rings, shared_rings._describe(client.channel), "store")) as shared:
        for count in (1, 2):
            payloads.append(payload_in_new_ring(rings))
            assert shared.find(payloads[-1]) is not None
            assert len(memories) == count
        place = shared.find(payloads[0])
        assert memories.written(place.key) is not None, "the worker has ended, but its payload may be sent again"
        del payloads[0]
        payloads.append(payload_in_new_ring(rings))
        assert shared.find(payloads[-1]) is not None
        wait_for(lambda: memories.written(place.key) is None)
        assert len(memories) == 2
    wait_for(lambda: not len(memories))


def test_a_ring_that_is_given_while_the_stream_ends_is_taken_back(running, monkeypatch):
    """The stream ends in another thread. The uploader then sends the payload again, in the next stream."""
    store, client = running
    rings, give = Rings(), shared_rings.SharedRings._give
    payload = payload_in_new_ring(rings)
    shared = shared_rings.SharedRings(rings, shared_rings._describe(client.channel), "store")

    def give_late(self, *arguments):
        given = give(self, *arguments)
        self.close()
        return given

    monkeypatch.setattr(shared_rings.SharedRings, "_give", give_late)
    assert shared.find(payload) is None
    wait_for(lambda: not len(store._shared_memory.memories))


def payload_in_new_ring(rings):
    """Return a payload in a ring that nothing else uses."""
    ring, descriptor = SharedRing.create(1 << 20)
    rings.add(ring, descriptor)
    os.close(descriptor)
    return ring.view(Extent(0, MIN_PLACED_BYTES)).data


class TestRings:
    def test_an_address_is_found_in_its_ring_only(self):
        rings = Rings()
        made = [SharedRing.create(1 << 20) for _ in range(3)]
        for ring, descriptor in made:
            rings.add(ring, descriptor)
        for number, (ring, _) in enumerate(made):
            assert rings.find(ring.view(Extent(4096, 100))) == (number, 4096)
            assert rings.find(ring.memory) == (number, 0)
        assert rings.find(np.zeros(100, np.uint8)) is None

    def test_a_ring_that_is_unmapped_is_forgotten_but_not_before_its_payloads(self):
        rings = Rings()
        ring, descriptor = SharedRing.create(1 << 20)
        rings.add(ring, descriptor)
        payload = ring.view(Extent(256, 1000)).data
        del ring
        assert rings.find(np.frombuffer(payload, np.uint8)) == (0, 256)
        del payload
        assert not rings._rings
        with pytest.raises(OSError, match="ended"), rings.descriptor(0):
            pass

    def test_a_ring_may_be_unmapped_while_the_rings_are_in_use(self):
        """As when Python collects it in any thread, also in one that has the lock."""
        rings = Rings()
        made = [SharedRing.create(4096) for _ in range(2)]
        for ring, descriptor in made:
            rings.add(ring, descriptor)
        payload = made[1][0].memory
        with rings._lock:
            seen = iter(rings._rings.items())
            next(seen)
            used = rings._rings[0].descriptor
            del made[0], ring
            assert next(seen)[0] == 1, "who iterates is not disturbed"
            os.fstat(used)  # nor is who duplicates the descriptor
        assert rings.find(payload) == (1, 0)
        assert list(rings._rings) == [1]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(used)

    def test_a_store_cannot_write_to_a_ring(self):
        rings = Rings()
        ring, descriptor = SharedRing.create(1 << 20)
        rings.add(ring, descriptor)
        with rings.descriptor(0) as lent, pytest.raises(PermissionError):
            mmap.mmap(lent, 1 << 20, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def test_after_a_refusal_payloads_travel_in_messages_for_a_while(self, running, monkeypatch):
        store = shared_rings.StoreRings(Rings(), "store")
        assert store.begin(running[1].channel)._description is not None
        store.pause()
        assert store.begin(running[1].channel)._description is None
        monkeypatch.setattr(store, "_paused_until", 0.0)
        assert store.begin(running[1].channel)._description is not None
