from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from inference_svc.shipping.ring import SharedRing


@pytest.fixture
def ring():
    ring, descriptor = SharedRing.create(num_slots=3, slot_bytes=5000)
    yield ring, descriptor
    os.close(descriptor)


def test_slots_are_apart_and_begin_on_pages(ring):
    ring, _ = ring
    for index in range(3):
        ring.slot(index)[:] = index + 1
    assert [ring.slot(index).nbytes for index in range(3)] == [5000] * 3
    assert [set(ring.slot(index).tolist()) for index in range(3)] == [{1}, {2}, {3}]
    assert all(ring.slot(index).ctypes.data % mmap.PAGESIZE == 0 for index in range(3))
    assert ring.memory.nbytes == 3 * 8192


def test_an_attached_ring_shows_what_is_written_and_cannot_be_written(ring):
    ring, descriptor = ring
    attached = SharedRing.attach(descriptor, 3, 5000, ring.stride)
    ring.slot(2)[:] = 42
    assert (attached.slot(2) == 42).all()
    with pytest.raises(ValueError, match="read-only"):
        attached.slot(2)[0] = 1


def test_memory_outlives_its_descriptor():
    ring, descriptor = SharedRing.create(1, 100)
    attached = SharedRing.attach(descriptor, 1, 100, ring.stride)
    os.close(descriptor)
    ring.slot(0)[:] = 5
    view = attached.slot(0)
    del ring, attached
    assert view.sum() == 500


def test_nobody_can_shrink_it_under_another(ring):
    _, descriptor = ring
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_it_has_no_name_that_could_be_left_behind(ring):
    _, descriptor = ring
    file = Path(f"/proc/self/fd/{descriptor}")
    assert str(file.readlink()).startswith("/memfd:")
    assert file.stat().st_nlink == 0


@pytest.mark.parametrize("index", [-1, 3])
def test_no_slot_beyond_the_ends(ring, index):
    with pytest.raises(IndexError, match=str(index)):
        ring[0].slot(index)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 1), (1, 0), (-1, -1)])
def test_senseless_sizes_are_refused(num_slots, slot_bytes):
    with pytest.raises(ValueError, match="slots of some size"):
        SharedRing.create(num_slots, slot_bytes)


def test_too_little_memory_is_an_error_and_takes_none():
    with pytest.raises(OSError, match="available"):
        SharedRing.create(1, 1 << 50)
