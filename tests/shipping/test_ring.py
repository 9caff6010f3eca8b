from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from inference_svc.shipping.ring import Extent, SharedRing


@pytest.fixture
def ring():
    ring, descriptor = SharedRing.create(10_000)
    yield ring, descriptor
    os.close(descriptor)


def test_the_ring_has_whole_pages(ring):
    ring, _ = ring
    assert ring.ring_bytes == ring.memory.nbytes == 12_288
    assert ring.memory.ctypes.data % mmap.PAGESIZE == 0


def test_extents_are_views_of_their_bytes(ring):
    ring, _ = ring
    for number in range(3):
        ring.view(Extent(number * 256, 200))[:] = number + 1
    assert [set(ring.memory[at : at + 200].tolist()) for at in (0, 256, 512)] == [{1}, {2}, {3}]
    assert set(ring.memory[200:256].tolist()) == {0}


def test_an_attached_ring_is_a_read_only_view(ring):
    ring, descriptor = ring
    attached = SharedRing.attach(descriptor, ring.ring_bytes)
    extent = Extent(512, 5000)
    ring.view(extent)[:] = 42
    assert (attached.view(extent) == 42).all()
    with pytest.raises(ValueError, match="read-only"):
        attached.view(extent)[0] = 1


def test_memory_outlives_its_descriptor():
    ring, descriptor = SharedRing.create(100)
    attached = SharedRing.attach(descriptor, ring.ring_bytes)
    os.close(descriptor)
    ring.view(Extent(0, 100))[:] = 5
    view = attached.view(Extent(0, 100))
    del ring, attached
    assert view.sum() == 500


def test_no_process_can_shrink_the_ring(ring):
    _, descriptor = ring
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_the_ring_has_no_name_in_the_file_system(ring):
    _, descriptor = ring
    file = Path(f"/proc/self/fd/{descriptor}")
    assert str(file.readlink()).startswith("/memfd:")
    assert file.stat().st_nlink == 0


@pytest.mark.parametrize("extent", [(-256, 300), (0, 0), (0, 12_289), (12_288, 1), (256, -1)])
def test_no_extent_beyond_the_ends(ring, extent):
    with pytest.raises(IndexError, match=str(extent[0])):
        ring[0].view(Extent(*extent))


@pytest.mark.parametrize("ring_bytes", [0, -1])
def test_invalid_sizes_are_refused(ring_bytes):
    with pytest.raises(ValueError, match="needs at least 1"):
        SharedRing.create(ring_bytes)


def test_too_little_memory_is_an_error_and_allocates_nothing():
    with pytest.raises(OSError, match="available"):
        SharedRing.create(1 << 50)


def test_another_size_than_the_rings_is_refused(ring):
    with pytest.raises(ValueError, match="size"):
        SharedRing.attach(ring[1], 1 << 20)
