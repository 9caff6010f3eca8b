"""The parts of many captures are parsed as protobuf does, without a copy of their chunks."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.v1 import capture_pb2, errors_pb2, store_pb2
from residuum.wire.rows.capture_batches import parse_captures
from residuum.wire.rows.frames import FrameError

chunks = st.builds(
    lambda size, crc32c: capture_pb2.Chunk(crc32c=crc32c, payload=bytes(size)),
    st.integers(0, 300),
    st.integers(0, 2**32 - 1),
)
parts = st.builds(
    lambda index, chunks, is_last, rows: store_pb2.CaptureRows(
        index=index,
        chunks=chunks,
        is_last=is_last,
        manifest=capture_pb2.CaptureManifest(num_rows=rows) if rows else None,
        error=errors_pb2.ItemError(message="gone") if is_last and not chunks else None,
        placed_chunks=[store_pb2.PlacedChunk(offset=1, num_bytes=2)] if rows > 5 else [],
    ),
    st.integers(0, 4000),
    st.lists(chunks, max_size=3),
    st.booleans(),
    st.integers(0, 9),
)


@given(st.lists(parts, max_size=4))
def test_a_message_is_parsed_as_protobuf_does(captures):
    parsed = parse_captures(store_pb2.ReadCapturesResponse(captures=captures).SerializeToString())
    for part, (rows, views) in zip(captures, parsed, strict=True):
        assert [capture_pb2.Chunk.FromString(bytes(view)) for view in views] == list(part.chunks)
        part.ClearField("chunks")
        assert rows == part


def test_chunks_are_not_copied():
    part = store_pb2.CaptureRows(index=1, chunks=[capture_pb2.Chunk(payload=b"abcd")])
    data = store_pb2.ReadCapturesResponse(captures=[part]).SerializeToString()
    ((_, (chunk,)),) = parse_captures(data)
    assert chunk.obj is data


def test_fields_that_a_newer_store_adds_are_passed_over():
    part = store_pb2.CaptureRows(index=1, is_last=True).SerializeToString() + b"\xa0\x06\x05"
    data = b"\xb2\x06\x02hi\x0a" + bytes([len(part)]) + part
    ((rows, views),) = parse_captures(data)
    assert (rows.index, rows.is_last, views) == (1, True, [])


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x0a\x05\x10", b"\x0a\x02\x7a\x09", b"\x0a\x03\x0a\x01\xff"])
def test_bytes_that_are_no_message(data):
    with pytest.raises(FrameError):
        parse_captures(data)


@given(st.lists(parts, min_size=1, max_size=3), st.data())
def test_no_cut_adds_or_changes_a_chunk(captures, data):
    message = store_pb2.ReadCapturesResponse(captures=captures).SerializeToString()
    cut = message[: data.draw(st.integers(0, len(message) - 1))]
    try:
        parsed = parse_captures(cut)
    except FrameError:
        return
    whole = parse_captures(message)  # a message that is cut between two parts is a message
    assert len(parsed) < len(whole)
    assert parsed == whole[: len(parsed)]


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_are_refused_or_parsed_as_protobuf_does(data):
    try:
        parsed = parse_captures(data)
    except FrameError:
        return
    try:
        message = store_pb2.ReadCapturesResponse.FromString(data)
    except DecodeError:
        return  # our parser does not look into chunks
    assert [rows.index for rows, _ in parsed] == [part.index for part in message.captures]
    assert [len(views) for _, views in parsed] == [len(part.chunks) for part in message.captures]
