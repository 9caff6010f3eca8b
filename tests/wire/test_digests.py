"""Digests match the contract's test vectors."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from residuum.v1 import tensor_pb2
from residuum.wire.digests import digest_of_bytes, vector_message
from residuum.wire.dtypes import dtype_name, item_bytes, numpy_dtype

FILE = Path(__file__).parents[2] / "protos" / "residuum" / "v1" / "vector_digests.json"
CASES = json.loads(FILE.read_text())["vectors"]
FLOAT32 = tensor_pb2.DATA_TYPE_FLOAT32


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_vectors_of_the_contract(case):
    dtype = tensor_pb2.DataType.Value(case["dtype"])
    values = bytes.fromhex(case["values_hex"])
    assert len(values) == case["length"] * item_bytes(dtype)
    assert digest_of_bytes(dtype, values).hex() == case["digest_hex"]


def test_no_two_vectors_of_the_contract_share_a_digest():
    assert len({case["digest_hex"] for case in CASES}) == len(CASES)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=20))
def test_the_rule_in_words(values):
    message = vector_message(np.array(values, np.float32))
    head = b"residuum.vector.v1" + struct.pack("<I", 1) + struct.pack("<Q", len(values))
    body = struct.pack(f"<{len(values)}f", *values)
    assert message.values == body
    assert message.digest == hashlib.sha256(head + body).digest()
    assert message.dtype == FLOAT32


def test_strides_and_byte_order_do_not_matter():
    table = np.arange(6, dtype=">f8").reshape(2, 3)
    assert vector_message(table[:, 0]) == vector_message(np.array([0, 3], np.float32))


@pytest.mark.parametrize(
    ("dtype", "values"), [(FLOAT32, b"123"), (tensor_pb2.DATA_TYPE_FLOAT16, b"1"), (0, b""), (9, b"")]
)
def test_bytes_that_are_no_vector(dtype, values):
    with pytest.raises(ValueError, match=r"."):
        digest_of_bytes(dtype, values)


def test_dtypes():
    for number in set(tensor_pb2.DataType.values()) - {0}:
        assert numpy_dtype(number).name == dtype_name(number)
        assert item_bytes(number) == numpy_dtype(number).itemsize
    assert dtype_name(77) == "unknown"
    for bad in (lambda: numpy_dtype(0), lambda: item_bytes(77)):
        with pytest.raises(ValueError, match="known: float32, float16, bfloat16"):
            bad()
