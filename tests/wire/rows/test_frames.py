"""Hand-written and protobuf's serialisation agree byte for byte, and the parser survives arbitrary bytes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from residuum.v1 import capture_pb2, store_pb2, tensor_pb2
from residuum.wire.limits import MAX_CHUNK_BYTES, MAX_CHUNK_POSITIONS, MAX_MESSAGE_BYTES
from residuum.wire.rows import frames

DTYPES = {
    tensor_pb2.DATA_TYPE_FLOAT32: np.float32,
    tensor_pb2.DATA_TYPE_FLOAT16: np.float16,
    tensor_pb2.DATA_TYPE_BFLOAT16: ml_dtypes.bfloat16,
}
ascending = st.sets(st.integers(0, 100_000), min_size=1, max_size=6).map(sorted)


@st.composite
def chunks(draw):
    dtype = draw(st.sampled_from(list(DTYPES)))
    header = capture_pb2.ChunkHeader(
        sequence=draw(st.integers(0, 3)), site=draw(st.integers(0, 4)), layers=draw(ascending),
        positions=draw(ascending), dtype=dtype, width=draw(st.integers(1, 40)), encoding=draw(st.integers(0, 1)),
    )  # fmt: skip
    shape = (len(header.layers), len(header.positions), header.width)
    rows = np.random.default_rng(draw(st.integers(0, 99))).normal(size=shape).astype(DTYPES[dtype])
    return header, rows


@given(chunks())
def test_a_chunk_by_hand_is_protobufs_own(given_chunk):
    header, rows = given_chunk
    payload = rows.tobytes()
    crc = frames.checksum(payload)
    by_hand = frames.chunk_prefix(header, crc, len(payload)) + payload
    message = capture_pb2.Chunk(header=header, crc32c=crc, payload=payload)
    assert by_hand == message.SerializeToString()
    view = frames.parse_chunk(by_hand)
    assert view.header == header
    assert view.crc32c == crc
    assert view.verify()
    assert view.rows().dtype == rows.dtype
    assert view.rows().tobytes() == payload
    assert view.rows().shape == rows.shape


@given(chunks(), st.integers(1, 2**64 - 1), st.text("abc-_.", min_size=1, max_size=128))
def test_an_append_by_hand_is_protobufs_own(given_chunk, number, capture_id):
    header, rows = given_chunk
    chunk = capture_pb2.Chunk(header=header, crc32c=7, payload=rows.tobytes()).SerializeToString()
    by_hand = frames.append_prefix(number, capture_id, len(chunk)) + chunk
    message = store_pb2.AppendChunksRequest(number=number, capture_id=capture_id)
    message.chunk.ParseFromString(chunk)
    assert by_hand == message.SerializeToString()
    view = frames.parse_append(by_hand)
    assert (view.number, view.capture_id, view.loss, bytes(view.chunk)) == (number, capture_id, None, chunk)


@given(chunks())
def test_a_read_by_hand_is_protobufs_own(given_chunk):
    header, rows = given_chunk
    chunk = capture_pb2.Chunk(header=header, payload=rows.tobytes()).SerializeToString()
    by_hand = frames.read_prefix(len(chunk)) + chunk
    message = store_pb2.ReadChunksResponse()
    message.chunk.ParseFromString(chunk)
    assert by_hand == message.SerializeToString()
    view = frames.parse_read(by_hand)
    assert isinstance(view, frames.ChunkView)
    assert view.header == header


def test_a_manifest_in_a_read():
    manifest = capture_pb2.CaptureManifest(num_rows=7)
    data = store_pb2.ReadChunksResponse(manifest=manifest).SerializeToString()
    assert frames.parse_read(data) == manifest


def test_a_loss_in_an_append():
    loss = store_pb2.RowLoss(layers=[1], positions=[2])
    view = frames.parse_append(store_pb2.AppendChunksRequest(number=3, capture_id="c", loss=loss).SerializeToString())
    assert (view.number, view.capture_id, view.loss, view.chunk) == (3, "c", loss, None)


def test_the_payload_is_not_copied():
    header = capture_pb2.ChunkHeader(layers=[0], positions=[0], dtype=tensor_pb2.DATA_TYPE_FLOAT32, width=2)
    buffer = bytearray(frames.chunk_prefix(header, 0, 8) + bytes(8))
    view = frames.parse_chunk(buffer)
    buffer[-4:] = np.float32(1).tobytes()
    assert view.rows()[0, 0].tolist() == [0, 1]
    assert np.shares_memory(view.rows(), np.frombuffer(buffer, np.uint8))


def test_fields_that_a_newer_peer_adds_are_passed_over():
    header = capture_pb2.ChunkHeader(layers=[0], positions=[0], dtype=tensor_pb2.DATA_TYPE_FLOAT32, width=1)
    data = frames.chunk_prefix(header, 0, 4) + bytes(4)
    varint, fixed64, text = b"\xa0\x06\x05", b"\xa9\x06" + bytes(8), b"\xb2\x06\x02hi"
    assert frames.parse_chunk(varint + fixed64 + data + text).header == header


def test_a_changed_byte_is_noticed():
    header = capture_pb2.ChunkHeader(layers=[0], positions=[0], dtype=tensor_pb2.DATA_TYPE_FLOAT32, width=1)
    payload = b"\x00\x01\x02\x03"
    good = frames.chunk_prefix(header, frames.checksum(payload), 4) + payload
    assert frames.parse_chunk(good).verify()
    assert not frames.parse_chunk(good[:-1] + b"\x04").verify()


def chunk_of_layers(damaged=None, packed=True):
    rows = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4)
    payload = bytearray(rows.tobytes())
    header = capture_pb2.ChunkHeader(layers=[1, 2, 5], positions=[0, 1], dtype=tensor_pb2.DATA_TYPE_FLOAT32, width=4)
    header.encoding = capture_pb2.ENCODING_RAW
    layers = list(map(frames.checksum, frames.layer_parts(header, memoryview(payload))))
    assert layers == [frames.checksum(layer.tobytes()) for layer in rows]
    crc = frames.checksum(payload)
    if damaged is not None:
        payload[damaged * 2 * 4 * 4 + 5] ^= 1
    if packed:
        return frames.chunk_prefix(header, crc, len(payload), layers) + bytes(payload)
    singly = b"".join(b"\x35" + number.to_bytes(4, "little") for number in layers)
    return capture_pb2.Chunk(header=header, crc32c=crc).SerializeToString() + singly + b"\x7a\x60" + bytes(payload)


@pytest.mark.parametrize("packed", [True, False])
def test_layers_have_their_own_checksums(packed):
    data = chunk_of_layers(packed=packed)
    view = frames.parse_chunk(data)
    assert list(view.layer_crc32c) == list(capture_pb2.Chunk.FromString(data).layer_crc32c)
    assert view.verify()
    assert view.verify_layers([0, 1, 2])


@pytest.mark.parametrize("damaged", range(3))
def test_damage_in_a_layer_is_noticed_there_alone(damaged):
    view = frames.parse_chunk(chunk_of_layers(damaged))
    assert not view.verify()
    assert [view.verify_layers([layer]) for layer in range(3)] == [layer != damaged for layer in range(3)]
    assert not view.verify_layers([0, 1, 2])


def test_without_checksums_of_layers_the_whole_payload_is_compared():
    view = replace(frames.parse_chunk(chunk_of_layers(damaged=2)), layer_crc32c=())
    assert not view.verify_layers([0])


@pytest.mark.parametrize("field", [b"\x32\x04abcd", b"\x32\x03abc", b"\x35abcd"])
def test_other_numbers_of_checksums_are_refused(field):
    with pytest.raises(frames.FrameError, match=r"checksums of layers, but 3 layers|truncated"):
        frames.parse_chunk(field + chunk_of_layers())


def test_the_checksum_is_crc32c():
    assert frames.checksum(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert frames.checksum(memoryview(b"x123456789")[1:]) == 0xE3069283


@pytest.mark.parametrize(
    "change",
    [
        {"layers": []},
        {"positions": []},
        {"width": 0},
        {"layers": [1, 0]},
        {"layers": [1, 1]},
        {"positions": [3, 2]},
        {"positions": [2, 2]},
        {"width": 3},
        {"dtype": 0},
        {"dtype": 99},
        {"positions": range(MAX_CHUNK_POSITIONS + 1)},
    ],
)
def test_headers_that_do_not_describe_their_payload(change):
    fields = {"layers": [0, 1], "positions": [0, 1], "dtype": tensor_pb2.DATA_TYPE_FLOAT32, "width": 2} | change
    data = capture_pb2.Chunk(header=capture_pb2.ChunkHeader(**fields), payload=bytes(32)).SerializeToString()
    with pytest.raises(frames.FrameError):
        frames.parse_chunk(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of more than ten bytes
        b"\x0a\x05ab",  # ends within the field
        b"\x0b",  # a group, which proto3 lacks
        b"\x0d\x01\x02",  # a truncated fixed32
        b"\x0a\x01\xff",  # the header is not a message
    ],
)
def test_bytes_that_are_no_frame(data):
    for parse in (frames.parse_chunk, frames.parse_append, frames.parse_read):
        with pytest.raises(frames.FrameError):
            parse(data)


def test_a_chunk_without_a_header():
    with pytest.raises(frames.FrameError, match="no header"):
        frames.parse_chunk(capture_pb2.Chunk(payload=b"1234").SerializeToString())


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_are_refused_or_parsed_as_protobuf_does(data):
    for parse, kind in (
        (frames.parse_chunk, capture_pb2.Chunk),
        (frames.parse_append, store_pb2.AppendChunksRequest),
        (frames.parse_read, store_pb2.ReadChunksResponse),
    ):
        try:
            parse(data)
        except frames.FrameError:
            continue
        try:
            kind.FromString(data)
        except DecodeError:
            # Our parser looks only at the top level and known fields, so it accepts messages with bad strings inside.
            continue


@given(chunks(), st.data())
def test_every_cut_is_refused(given_chunk, data):
    header, rows = given_chunk
    chunk = capture_pb2.Chunk(header=header, crc32c=1, payload=rows.tobytes()).SerializeToString()
    frame = frames.append_prefix(9, "c", len(chunk)) + chunk
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    with pytest.raises(frames.FrameError):
        frames.parse_append(cut)


def test_the_largest_chunk_fits_a_message():
    header = capture_pb2.ChunkHeader(
        layers=range(128), positions=range(1_000_000, 1_000_000 + MAX_CHUNK_POSITIONS), width=1 << 20, sequence=99,
        dtype=tensor_pb2.DATA_TYPE_FLOAT32, site=capture_pb2.SITE_RESID_POST, encoding=capture_pb2.ENCODING_RAW,
    )  # fmt: skip
    prefix = frames.chunk_prefix(header, 1 << 31, MAX_CHUNK_BYTES)
    around = frames.append_prefix(1 << 63, "x" * 128, MAX_CHUNK_BYTES + len(prefix))
    assert MAX_CHUNK_BYTES + len(prefix) + len(around) < MAX_MESSAGE_BYTES
