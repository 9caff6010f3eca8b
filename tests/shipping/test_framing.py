from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.shipping.framing import append_message, cut, payload_bytes
from residuum.v1 import capture_pb2, store_pb2, tensor_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.limits import MAX_CHUNK_BYTES, MAX_CHUNK_POSITIONS, TARGET_CHUNK_BYTES
from residuum.wire.rows import frames
from tests.encoding_cases import FORMATS, basis, rows
from tests.encoding_cases import header_of as encoded_header

BF16 = tensor_pb2.DATA_TYPE_BFLOAT16
F32 = tensor_pb2.DATA_TYPE_FLOAT32


def header_of(layers, positions, width, dtype=F32):
    return capture_pb2.ChunkHeader(
        sequence=3,
        site=capture_pb2.SITE_ATTN_OUT,
        layers=layers,
        positions=positions,
        dtype=dtype,
        width=width,
        encoding=capture_pb2.ENCODING_RAW,
    )


def payload_of(header):
    size = payload_bytes(header)
    return np.resize(np.arange(251, dtype=np.uint8), size).data


@st.composite
def headers(draw):
    width = draw(st.sampled_from([1, 7, 576, 2048, 16384, 100_000]))
    dtype = draw(st.sampled_from([BF16, F32]))
    row_bytes = width * numpy_dtype(dtype).itemsize
    most_rows = max(1, (6 << 20) // row_bytes)
    positions = draw(st.integers(1, min(most_rows, 6000)))
    layers = draw(st.integers(1, max(1, min(80, most_rows // positions))))
    step = draw(st.integers(1, 5))
    return header_of(range(1, 1 + step * layers, step), range(7, 7 + step * positions, step), width, dtype)


@settings(max_examples=60, deadline=None)
@given(headers())
def test_protobuf_parses_the_frames_into_the_same_rows(header):
    payload = payload_of(header)
    dtype = np.dtype(f"V{numpy_dtype(header.dtype).itemsize}")
    rows = np.frombuffer(payload, dtype).reshape(len(header.layers), len(header.positions), header.width)
    again = np.zeros_like(rows)
    seen = np.zeros(rows.shape[:2], dtype=int)
    layer_at = {layer: at for at, layer in enumerate(header.layers)}
    position_at = {position: at for at, position in enumerate(header.positions)}
    for number, piece in enumerate(cut(header, payload), start=1):
        message = store_pb2.AppendChunksRequest.FromString(append_message(number, "capture", piece))
        part = message.chunk.header
        assert (message.number, message.capture_id) == (number, "capture")
        assert (part.sequence, part.site, part.dtype, part.encoding) == (3, header.site, header.dtype, header.encoding)
        assert message.chunk.crc32c == frames.checksum(message.chunk.payload)
        at = np.ix_([layer_at[n] for n in part.layers], [position_at[n] for n in part.positions])
        again[at] = np.frombuffer(message.chunk.payload, dtype).reshape(again[at].shape)
        seen[at] += 1
    assert (seen == 1).all()
    assert again.tobytes() == bytes(payload)


@settings(max_examples=60, deadline=None)
@given(headers())
def test_every_chunk_keeps_to_the_limits(header):
    payload = payload_of(header)
    pieces = list(cut(header, payload))
    layer_bytes = len(payload) // len(header.layers)
    for piece in pieces:
        chunk = frames.chunk_prefix(piece.header, 0, len(piece.payload))
        assert len(chunk) + len(piece.payload) <= MAX_CHUNK_BYTES
        assert len(piece.header.positions) <= MAX_CHUNK_POSITIONS
        assert len(piece.payload) <= TARGET_CHUNK_BYTES or len(piece.header.layers) == 1
    if layer_bytes <= TARGET_CHUNK_BYTES and len(header.positions) <= MAX_CHUNK_POSITIONS:
        per_chunk = TARGET_CHUNK_BYTES // layer_bytes
        sizes = [len(piece.header.layers) for piece in pieces]
        assert len(sizes) == math.ceil(len(header.layers) / per_chunk)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_encoding_do_not_depend_on_the_cut(name):
    """3 layers of 900 positions, or of so many that one layer does not fit a chunk."""
    small = FORMATS[name]
    dimensions, features = (256, 512) if small.features else (small.dimensions and 2048, 0)  # an SAE keeps at most 256
    wide = dataclasses.replace(small, width=4096, dimensions=dimensions, features=features)
    positions = max(900, (2 << 20) // wide.row_bytes + 1)
    values = rows(wide.dtype, (3, positions, 4096))
    payload = memoryview(wide.encode(values, basis(wide)))
    header = encoded_header(wide, [2, 3, 5], range(10, 10 + positions))
    prefixes, encoded = wide.split(payload, 3, positions)
    pieces = list(cut(header, payload))
    assert len(pieces) >= 3
    seen = np.zeros((3, positions), int)
    for piece in pieces:
        chunk = frames.parse_append(append_message(1, "capture", piece)).chunk
        view = frames.parse_chunk(chunk)
        at = np.ix_([[2, 3, 5].index(n) for n in view.header.layers], [n - 10 for n in view.header.positions])
        own_prefixes, own = view.split()
        np.testing.assert_array_equal(own, encoded[at])
        if prefixes is not None:
            np.testing.assert_array_equal(own_prefixes, prefixes[at[0][:, 0]])
        seen[at] += 1
    assert (seen == 1).all()


def test_pieces_are_views_of_the_ring():
    header = header_of(range(60), range(32), 576, BF16)
    payload = np.zeros(payload_bytes(header), np.uint8)
    pieces = list(cut(header, payload.data))
    payload[:] = 9
    assert [bytes(piece.payload[:1]) for piece in pieces] == [b"\x09", b"\x09"]
    assert [len(piece.header.layers) for piece in pieces] == [30, 30]


def test_the_largest_header_and_the_largest_layer_fit_a_chunk():
    positions = range(2**32 - 1 - MAX_CHUNK_POSITIONS, 2**32 - 1)
    width = ((2 << 20) - (64 << 10)) // (2 * MAX_CHUNK_POSITIONS)
    header = header_of([2**31], positions, width, BF16)
    (piece,) = cut(header, payload_of(header))
    chunk = frames.chunk_prefix(piece.header, 2**32 - 1, len(piece.payload))
    assert len(chunk) + len(piece.payload) <= MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (header_of([0], [0], 4), 15),
        (header_of([0], [0], 4), 17),
        (header_of([], [0], 4), 0),
        (header_of([0], [], 4), 0),
        (header_of([0], [0], 1 << 20, F32), 4 << 20),
        (header_of([0], [0], 4, tensor_pb2.DATA_TYPE_UNSPECIFIED), 16),
    ],
    ids=["short", "long", "no-layers", "no-positions", "row-too-large", "no-dtype"],
)
def test_payloads_that_cannot_be_framed_are_refused(header, size):
    with pytest.raises(ValueError, match=r"bytes|element type"):
        cut(header, memoryview(bytearray(size)))  # before anything is sent
