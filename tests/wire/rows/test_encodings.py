"""Encodings: the byte layouts of capture.proto, round-trip error bounds, and unusual rows."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from residuum.v1 import capture_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.rows.encodings import (
    BF16,
    BY_DIMENSION,
    BY_ROW,
    ENCODING_NAMES,
    ENCODINGS,
    FP16,
    FP32,
    FULL8,
    PROJECT,
    RAW,
    RP,
    RP8,
    SAE,
    TOPK,
    TOPK8,
    EncodingError,
    RowFormat,
    basis_of,
)
from residuum.wire.rows.frames import FrameError, parse_chunk
from tests.encoding_cases import B16, F16, F32, FORMATS, WIDTH, basis, rows

FINITE = st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32)
TINY = 1e-36
"""The allowed error of numbers that are too small for float32's precision."""


def round_trip(form: RowFormat, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the decoded rows, the encoded ones, and the prefixes."""
    prefixes, encoded = form.split(form.encode(values, basis(form)), *values.shape[:2])
    decoded = form.decode(encoded, prefixes if prefixes is None else prefixes[:, None])
    assert decoded.shape == (*values.shape[:2], form.decoded_width)
    assert decoded.dtype == form.decoded_dtype
    return decoded, encoded, prefixes


def rounding(values: np.ndarray) -> np.ndarray:
    """Return the error that float32 arithmetic may add to quantised numbers."""
    return 4e-7 * np.abs(values).max(axis=-1, keepdims=True) + TINY


# The bytes


@pytest.mark.parametrize("name", FORMATS)
def test_a_payload_has_the_bytes_that_its_format_says(name):
    form = FORMATS[name]
    payload = form.encode(rows(form.dtype), basis(form))
    assert len(payload) == form.payload_bytes(2, 3) == 2 * (form.prefix_bytes + 3 * form.row_bytes)


def test_bytes_of_a_row_are_those_of_the_table():
    sizes = {name: (form.prefix_bytes, form.row_bytes) for name, form in FORMATS.items()}
    assert sizes == {
        "raw": (0, 2 * 24),
        "fp32": (0, 4 * 24),
        "fp16": (0, 2 * 24),
        "bf16": (0, 2 * 24),
        "full8": (0, 8 + 24),
        "full8 along dimensions": (8 * 24, 24),
        "rp8": (0, 8 + 10),
        "rp": (0, 4 * 10),
        "topk8": (0, 8 + 3 * 5),
        "topk": (0, 4 * 5),
        "project": (0, 4 * 30),
        "sae": (0, 8 * 6),
    }


def test_full8_by_hand():
    form = RowFormat(FULL8, 4, F32)
    row = np.array([[[-1.0, 0.0, 254.0, 0.5]]], np.float32)
    assert form.encode(row) == struct.pack("<ff4B", 1.0, -1.0, 0, 1, 255, 2)  # 1.5 is rounded to even


def test_full8_along_dimensions_by_hand():
    form = RowFormat(FULL8, 2, F32, axis=BY_DIMENSION)
    two = np.array([[[0.0, 5.0], [255.0, 5.0], [2.5, 5.0]], [[1.0, 0.0], [1.0, 510.0], [1.0, 1.0]]], np.float32)
    first = struct.pack("<4f6B", 1.0, 0.0, 0.0, 5.0, 0, 0, 255, 0, 2, 0)
    second = struct.pack("<4f6B", 0.0, 2.0, 1.0, 0.0, 0, 0, 0, 255, 0, 0)
    assert form.encode(two) == first + second


def test_topk_by_hand():
    row = np.array([[[0.5, -7.0, 3.0, -3.0, 0.0, 3.0]]], np.float32)
    expected = struct.pack("<3H3f", 1, 2, 3, -7.0, 3.0, -3.0)  # of equal magnitudes, the first are kept
    assert RowFormat(TOPK, 6, F32, dimensions=3).encode(row) == expected
    scale = np.float32(10) / np.float32(255)
    expected = struct.pack("<ff3H3B", scale, -7.0, 1, 2, 3, 0, 255, 102)
    assert RowFormat(TOPK8, 6, F32, dimensions=3).encode(row) == expected


def test_topk_keeps_elements_of_the_models_own_type():
    values = np.array([[[1.0, -2.5, 0.25]]], ml_dtypes.bfloat16)
    expected = struct.pack("<2H2H", 0, 1, 0x3F80, 0xC020)
    assert RowFormat(TOPK, 3, B16, dimensions=2).encode(values) == expected


def test_projections_by_hand():
    values = np.array([[[1.0, 2.0, 4.0, 8.0]]], np.float32)
    form = RowFormat(RP, 4, F32, dimensions=4)
    signs = np.array(
        [[-1, -1, -1, -1], [1, -1, -1, -1], [-1, -1, -1, 1], [1, -1, -1, 1]]
    )  # from the test vectors, seed 0
    expected = (values.astype(np.float64) @ signs / 2).astype(np.float32)
    assert form.encode(values, basis(form, seed=0)) == expected.tobytes()
    form = RowFormat(PROJECT, 4, F32, dimensions=2)
    vectors = [np.array([1, 0, 0, 1], np.float32), np.array([0, -1, 0.5, 0], np.float32)]
    assert form.encode(values, basis_of(form, capture_pb2.EncodingOptions(), vectors)) == struct.pack("<2f", 9, 0)


def test_payloads_are_read_without_a_copy():
    form = FORMATS["full8 along dimensions"]
    buffer = bytearray(form.encode(rows(form.dtype)))
    prefixes, encoded = form.split(buffer, 2, 3)
    assert np.shares_memory(encoded, np.frombuffer(buffer, np.uint8))
    assert np.shares_memory(prefixes, np.frombuffer(buffer, np.uint8))
    with pytest.raises(EncodingError, match="2 layers of 4 positions"):
        form.split(buffer, 2, 4)


# Round trips


@given(hnp.arrays(np.float32, (1, 3, 7), elements=st.floats(width=32)))
def test_casts_are_those_of_ieee(values):
    with np.errstate(over="ignore", invalid="ignore"):
        for encoding, dtype in [(RAW, np.float32), (FP32, np.float32), (FP16, np.float16), (BF16, ml_dtypes.bfloat16)]:
            decoded, _, _ = round_trip(RowFormat(encoding, 7, F32), values)
            np.testing.assert_array_equal(decoded.astype(np.float32), values.astype(dtype).astype(np.float32))


@given(hnp.arrays(np.float32, (2, 4, 9), elements=FINITE))
def test_full8_is_right_to_half_a_scale(values):
    decoded, encoded, _ = round_trip(RowFormat(FULL8, 9, F32), values)
    spread = values.max(axis=-1).astype(np.float64) - values.min(axis=-1)
    np.testing.assert_allclose(encoded["scale"], spread / 255, rtol=1e-6, atol=TINY)
    limit = 0.5 * encoded["scale"].astype(np.float64)[..., None] + rounding(values)
    assert (np.abs(decoded.astype(np.float64) - values) <= limit).all()


@given(hnp.arrays(np.float32, (2, 4, 9), elements=FINITE))
def test_full8_along_dimensions_is_right_to_half_a_scale(values):
    decoded, _, prefixes = round_trip(RowFormat(FULL8, 9, F32, axis=BY_DIMENSION), values)
    spread = values.max(axis=1).astype(np.float64) - values.min(axis=1)
    np.testing.assert_allclose(prefixes["scale"], spread / 255, rtol=1e-6, atol=TINY)
    across = np.abs(values).max(axis=1, keepdims=True)
    limit = 0.5 * prefixes["scale"].astype(np.float64)[:, None] + 4e-7 * across + TINY
    assert (np.abs(decoded.astype(np.float64) - values) <= limit).all()


@given(hnp.arrays(np.float32, (1, 3, 12), elements=FINITE), st.integers(1, 12))
def test_topk_keeps_exactly_the_largest_elements(values, k):
    decoded, encoded, _ = round_trip(RowFormat(TOPK, 12, F32, dimensions=k), values)
    for row, back, index in zip(values[0], decoded[0], encoded["index"][0], strict=True):
        chosen = sorted(range(12), key=lambda at: (-abs(row[at]), at))[:k]
        assert sorted(chosen) == index.tolist()
        np.testing.assert_array_equal(back, [x if at in chosen else 0 for at, x in enumerate(row)])


@given(hnp.arrays(np.float32, (1, 3, 12), elements=FINITE), st.integers(1, 12))
def test_topk8_is_topk_to_half_a_scale(values, k):
    exact, kept, _ = round_trip(RowFormat(TOPK, 12, F32, dimensions=k), values)
    decoded, encoded, _ = round_trip(RowFormat(TOPK8, 12, F32, dimensions=k), values)
    np.testing.assert_array_equal(encoded["index"], kept["index"])
    limit = 0.5 * encoded["scale"].astype(np.float64)[..., None] + rounding(values)
    assert (np.abs(decoded.astype(np.float64) - exact) <= limit).all()


@pytest.mark.parametrize("dtype", [F32, F16, B16])
def test_projections_are_the_sums_of_float64_to_float32(dtype):
    values = rows(dtype, (2, 5, 600))
    for form in (RowFormat(RP, 600, dtype, dimensions=129), RowFormat(PROJECT, 600, dtype, dimensions=3)):
        matrix = basis(form)
        decoded, _, _ = round_trip(form, values)
        exact = values.astype(np.float64) @ matrix.astype(np.float64)
        limit = 600 * 2**-24 * (np.abs(values.astype(np.float64)) @ np.abs(matrix).astype(np.float64))
        assert (np.abs(decoded - exact) <= limit).all()


@given(st.integers(1, 24), st.integers(0, 2**64 - 1))
def test_rp8_is_rp_to_half_a_scale(k, seed):
    values = rows(seed=k)
    plain = RowFormat(RP, WIDTH, F32, dimensions=k)
    exact = plain.split(plain.encode(values, basis(plain, seed)), 2, 3)[1]["y"]
    form = RowFormat(RP8, WIDTH, F32, dimensions=k)
    _, encoded = form.split(form.encode(values, basis(form, seed)), 2, 3)
    limit = 0.5 * encoded["scale"].astype(np.float64)[..., None] + rounding(exact)
    assert (np.abs(form.decode(encoded).astype(np.float64) - exact) <= limit).all()


def test_rows_that_are_all_the_same_come_back_exactly():
    for name in ("full8", "full8 along dimensions", "topk8"):
        form = FORMATS[name]
        values = np.full((2, 3, WIDTH), -2.75, numpy_dtype(form.dtype))
        decoded, encoded, prefixes = round_trip(form, values)
        scales = encoded["scale"] if prefixes is None else prefixes["scale"]
        assert (scales == 0).all()
        kept = decoded != 0
        assert kept.sum(axis=-1).max() == (form.dimensions or WIDTH)
        assert (decoded[kept] == -2.75).all()


# Values that are not finite


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_not_finite_stay_visible_in_their_place(name, odd):
    form = FORMATS[name]
    values = rows(form.dtype)
    clean, _, _ = round_trip(form, values)
    values[1, 2, 7] = odd
    with np.errstate(all="ignore"):
        decoded, encoded, prefixes = round_trip(form, values)
    touched = np.zeros(decoded.shape, bool)
    if form.encoding in (RAW, FP32, FP16, BF16, TOPK):
        touched[1, 2, 7] = True
        np.testing.assert_array_equal(decoded[1, 2, 7].astype(np.float32), np.float32(odd))
    elif form.axis == BY_DIMENSION:
        touched[1, :, 7] = True
        assert np.isnan(decoded[touched]).all()
        assert np.isnan(prefixes["zero"][1, 7])
        assert (encoded["q"][touched] == 0).all()
    elif form.encoding == SAE:
        touched[1, 2] = True
        assert not np.isfinite(encoded["value"][1, 2]).any()
    else:
        touched[1, 2] = True
        assert not np.isfinite(decoded[touched]).any()
    if form.encoding in (FULL8, RP8, TOPK8) and form.axis != BY_DIMENSION:
        assert np.isnan(decoded[touched]).all()
        assert np.isnan([encoded["scale"][1, 2], encoded["zero"][1, 2]]).all()
        assert (encoded["q"][1, 2] == 0).all()
    if form.encoding == TOPK8:
        assert encoded["index"][1, 2].tolist() == [0, 1, 2, 3, 4]
    if form.encoding == TOPK:  # the non-finite element displaces another one
        touched[1, 2] = True
    np.testing.assert_array_equal(decoded[~touched], clean[~touched])


def test_a_difference_that_is_not_finite_is_reported():
    values = np.array([[[3e38, -3e38, 0.0]]], np.float32)
    with np.errstate(over="ignore"):
        decoded, encoded, _ = round_trip(RowFormat(FULL8, 3, F32), values)
        assert np.isnan(decoded).all()
        decoded, encoded, _ = round_trip(RowFormat(TOPK8, 3, F32, dimensions=2), values)
    assert np.isnan(decoded).all()
    assert encoded["index"].tolist() == [[[0, 1]]]


def test_values_beyond_fp16_become_infinite():
    with np.errstate(over="ignore"):
        decoded, _, _ = round_trip(RowFormat(FP16, 2, F32), np.array([[[70000.0, -65504.0]]], np.float32))
    assert decoded.tolist() == [[[math.inf, -65504.0]]]


@pytest.mark.parametrize("name", ["topk", "topk8"])
def test_an_index_beyond_the_row_is_refused(name):
    form = FORMATS[name]
    _, encoded = form.split(bytearray(form.encode(rows(form.dtype))), 2, 3)
    encoded["index"][1, 2, 4] = WIDTH
    with pytest.raises(EncodingError, match="has the index 24, but only 24 elements"):
        form.decode(encoded)
    assert form.decode(encoded[:1]).shape == (1, 3, WIDTH)


# Inconsistent formats


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoding": 99}, "unknown encoding 99; known: raw, fp32"),
        ({"width": 0}, "at least one element"),
        ({"encoding": RP8}, "rp8 takes 1 to 24 dimensions, not 0"),
        ({"encoding": RP, "dimensions": 25}, "rp takes 1 to 24 dimensions, not 25"),
        ({"encoding": TOPK, "dimensions": 25}, "topk takes 1 to 24 dimensions, not 25"),
        ({"encoding": TOPK8, "dimensions": 5, "width": 65537}, "topk8 takes rows of at most 65536 elements"),
        ({"encoding": PROJECT}, "project needs at least one vector"),
        ({"encoding": SAE, "dimensions": 5}, "an autoencoder has 1 to 1048576 features, not 0"),
        ({"encoding": SAE, "dimensions": 5, "features": 1 << 21}, "an autoencoder has 1 to"),
        ({"encoding": SAE, "features": 40}, "sae keeps 1 to 40 features of a row, not 0"),
        ({"encoding": SAE, "features": 400, "dimensions": 257}, "sae keeps 1 to 256 features of a row, not 257"),
        ({"encoding": RAW, "features": 4}, "raw has no features"),
        ({"encoding": FULL8, "dimensions": 3}, "full8 takes no dimensions"),
        ({"encoding": RAW, "axis": BY_ROW}, "raw takes no quantization axis; only full8 does"),
        ({"encoding": FULL8, "axis": 7}, "unknown quantization axis 7"),
        ({"dtype": 0}, "unknown element type 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_formats_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RowFormat(**{"encoding": RAW, "width": WIDTH, "dtype": F32, **fields})


def test_rows_of_another_type_are_not_encoded():
    for values in (rows(F16), rows(F32, (2, 3, WIDTH + 1)), rows(F32, (WIDTH,))):
        with pytest.raises(EncodingError, match=r"rows must be \[layers, positions, 24\] of float32"):
            RowFormat(RAW, WIDTH, F32).encode(values)


def test_every_encoding_of_the_contract_has_a_name():
    assert set(ENCODINGS.values()) == set(capture_pb2.Encoding.values()) - {capture_pb2.ENCODING_UNSPECIFIED}
    for name, number in ENCODINGS.items():
        assert ENCODING_NAMES[number] == name == capture_pb2.Encoding.Name(number).removeprefix("ENCODING_").lower()


def test_unset_options_have_their_defaults():
    assert RowFormat(capture_pb2.ENCODING_UNSPECIFIED, WIDTH, F32) == RowFormat(RAW, WIDTH, F32)
    assert RowFormat(FULL8, WIDTH, F32) == RowFormat(FULL8, WIDTH, F32, axis=BY_ROW)
    assert str(FORMATS["rp8"]) == "rp8 of 10 dimensions, 24 elements of bfloat16"


@given(
    st.integers(0, 12),
    st.sampled_from([0, 1, 5, 65536, 2**31, 2**32 - 1]),
    st.sampled_from([0, 1, 4, 2**31 - 1, 2**32 - 1]),
    st.integers(0, 3),
    st.binary(max_size=40),
)
def test_headers_from_anywhere_are_refused_or_fit_their_payload(encoding, width, dimensions, axis, payload):
    header = capture_pb2.ChunkHeader(
        layers=[0], positions=[0], dtype=F32, encoding=encoding, width=width, dimensions=dimensions, axis=axis
    )
    data = capture_pb2.Chunk(header=header, payload=payload).SerializeToString()
    try:
        chunk = parse_chunk(data)
    except FrameError:
        return
    with np.errstate(all="ignore"):
        try:
            assert chunk.rows().shape == (1, 1, chunk.format.decoded_width)
        except EncodingError as error:
            assert "index" in str(error)  # noqa: PT017 - of the bytes, not of the header
