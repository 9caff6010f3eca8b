from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.shipping.protocol import (
    MAX_BODY_BYTES,
    Done,
    ExtentReady,
    Hello,
    Leaving,
    LossReport,
    MessageReader,
    ProtocolError,
)
from residuum.v1 import capture_pb2, store_pb2
from tests.shipping.support import make_header

LOSS = store_pb2.RowLoss(layers=[1], positions=[2, 3], reason=capture_pb2.INCOMPLETE_REASON_OVERFLOW, detail="full")
MESSAGES = [
    Hello(2**40),
    ExtentReady(2**63, 2**40, "capture-é", (make_header(range(32)),)),
    ExtentReady(1, 0, "", tuple(make_header(range(n)) for n in range(5))),
    LossReport(5, "x" * 128, LOSS),
    Done(2**64 - 1),
    Leaving(),
]


@given(st.lists(st.sampled_from(MESSAGES)), st.lists(st.integers(1, 40), min_size=1))
def test_messages_survive_any_cutting(messages, sizes):
    data = b"".join(message.encode() for message in messages)
    reader, read, at, turn = MessageReader(), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        read += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert read == messages


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IB", MAX_BODY_BYTES + 1, 4),
        struct.pack("<IB", 0, 9),
        struct.pack("<IB", 3, 4) + b"abc",
        struct.pack("<IB", 1, 5) + b"a",
        struct.pack("<IB", 4, 2) + b"abcd",
        struct.pack("<IBQQH", 18, 2, 1, 1, 0),
        struct.pack("<IBQQHI", 22, 2, 1, 1, 0, 1),
        struct.pack("<IBQQH", 21, 2, 1, 1, 0) + b"\0\0\0",
        struct.pack("<IBQQHI", 23, 2, 1, 1, 0, 1) + b"\xff",
        struct.pack("<IBQQH", 23, 2, 1, 1, 1) + b"\xff\0\0\0\0",
    ],
    ids=[
        "too-long",
        "unknown",
        "short-done",
        "leaving-with-body",
        "short-extent",
        "no-header",
        "header-beyond-the-end",
        "cut-length",
        "bad-header",
        "bad-id",
    ],
)
def test_anything_else_is_an_error(data):
    with pytest.raises(ProtocolError):
        list(MessageReader().feed(data))


def test_headers_that_do_not_fit_a_message_are_refused():
    header = make_header(range(1 << 16))
    with pytest.raises(ValueError, match="do not fit a message"):
        ExtentReady(1, 0, "a", (header,) * (MAX_BODY_BYTES // header.ByteSize() + 1)).encode()
