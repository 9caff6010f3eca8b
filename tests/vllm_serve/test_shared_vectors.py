"""Vectors that several API servers share in a folder."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from inference_svc.vllm_serve.shared_vectors import SharedVectors
from residuum.v1 import tensor_pb2
from residuum.wire.digests import digest_of_bytes

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 8
EACH = 4 * WIDTH


def vector(number: int) -> tensor_pb2.Vector:
    values = residuum.Vector.from_array(np.full(WIDTH, number, np.float32)).values.tobytes()
    dtype = tensor_pb2.DATA_TYPE_FLOAT32
    return tensor_pb2.Vector(digest=digest_of_bytes(dtype, values), dtype=dtype, values=values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "vectors"


def test_a_vector_of_one_process_is_found_by_another(folder: Path) -> None:
    one, other = (SharedVectors(folder, 10, 10 * EACH) for _ in range(2))
    wanted = [vector(1), vector(2)]
    assert other.find(item.digest for item in wanted) == []
    for item in wanted:
        one.put(item)
        one.put(item)  # a caller sends it again
    assert other.find(item.digest for item in [wanted[1], vector(3), wanted[0]]) == [wanted[1], wanted[0]]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(("max_vectors", "max_bytes"), [(100, 1000 * EACH), (1000, 100 * EACH)])
def test_the_least_recently_used_vectors_are_dropped(folder: Path, max_vectors: int, max_bytes: int) -> None:
    shared = SharedVectors(folder, max_vectors, max_bytes)
    for number in range(128):
        shared.put(vector(number))
        os.utime(folder / vector(number).digest.hex(), (number, number))
        shared.find([vector(0).digest])  # always the one used last
    left = [number for number in range(128) if shared.find([vector(number).digest])]
    assert left == [0, *range(29, 128)]
    assert len(list(folder.iterdir())) == 100


def test_a_file_that_was_cut_off_is_not_a_vector(folder: Path) -> None:
    shared = SharedVectors(folder, 10, 10 * EACH)
    shared.put(vector(1))
    (folder / vector(1).digest.hex()).write_bytes(vector(1).values[:-4])
    assert shared.find([vector(1).digest]) == []
