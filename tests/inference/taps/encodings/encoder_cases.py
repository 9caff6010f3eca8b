"""Rows to encode in every encoding, and the expected bytes, from the reference in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.encodings.check import bytes_of
from inference_svc.taps.encodings.sae_encoder import encoder_of
from residuum.v1 import capture_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.rows.encodings import (
    BY_DIMENSION,
    ENCODINGS,
    FULL8,
    PROJECT,
    RANDOM_PROJECTIONS,
    RP8,
    SAE,
    SIZED,
    RowFormat,
    basis_of,
)
from residuum.wire.sae import RELU
from tests import encoding_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from residuum.wire.sae import Encoder

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 2**64 - 3
VECTORS = 5


class Case(NamedTuple):
    """Rows as a block holds them, and their encoding."""

    name: str
    form: RowFormat
    rows: torch.Tensor
    """[units, positions, width], with gaps between the units."""
    vectors: np.ndarray
    """The vectors of PROJECT."""
    activation: tuple[int, int] = RELU, 0
    """The activation of SAE, and for TOP_K how many features may be above 0."""

    def basis(self, device: str = "cpu") -> torch.Tensor | None:
        """The basis for the encoder, made from the reference's own matrix."""
        if self.form.encoding == SAE:
            encoder = self.encoder()
            return encoder_of(torch.from_numpy(bytes_of(encoder)).to(device), encoder.shape)
        if self.form.encoding == PROJECT:
            return torch.from_numpy(self.vectors).to(device)
        if self.form.encoding not in RANDOM_PROJECTIONS:
            return None
        signs = np.sign(basis_of(self.form, capture_pb2.EncodingOptions(seed=SEED)))
        return torch.from_numpy(signs).to(device).to(self.rows.dtype if device == "cuda" else torch.float32)

    def encoder(self) -> Encoder:
        """The encoder of SAE."""
        activation, active = self.activation
        one = encoding_cases.encoder(self.form.features, self.form.width, activation=activation, active=active)
        if one.threshold is not None:
            one.threshold[:] *= 30  # so that some of the strongest outputs do not exceed theirs
        return one

    def check(self, payload: np.ndarray, *, exact_bfloat16: bool = True) -> None:
        """Compare an encoder's payload with the reference's: bit by bit, except for sums, whose order is arbitrary."""
        units, positions, width = self.rows.shape
        values = self.rows.contiguous().view(torch.uint8).numpy().view(numpy_dtype(self.form.dtype))
        basis = basis_of(self.form, capture_pb2.EncodingOptions(seed=SEED), list(self.vectors))
        if self.form.encoding == SAE:
            basis = self.encoder()
        wanted = np.frombuffer(self.form.encode(values.reshape(units, positions, width), basis), dtype=np.uint8)
        assert len(payload) == len(wanted)
        one, other = (self.form.split(data, units, positions) for data in (payload, wanted))
        got, expected = (
            self.form.decode(rows, None if prefixes is None else prefixes[:, None]).astype(np.float64)
            for prefixes, rows in (one, other)
        )
        if self.form.encoding == SAE:
            # Of features that are nearly as strong, either may be kept: the values are compared in their order.
            got, expected = (rows["value"].astype(np.float64) for _, rows in (one, other))
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected), err_msg=self.name)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected), err_msg=self.name)
        finite = np.isfinite(expected)
        if self.form.encoding == SAE:
            bound = 2e-6 * np.sqrt(width) * np.abs(expected[finite]).max()
            assert np.abs(got[finite] - expected[finite]).max() <= bound, self.name
        elif self.form.encoding in RANDOM_PROJECTIONS | {PROJECT}:
            bound = 1e-6 * np.sqrt(width) * np.abs(expected[finite]).max()
            if self.form.encoding == RP8:
                bound += 1.01 * np.nanmax(other[1]["scale"])
            assert np.abs(got[finite] - expected[finite]).max() <= bound, self.name
        elif exact_bfloat16 or self.form.encoding != capture_pb2.ENCODING_BF16:
            np.testing.assert_array_equal(got, expected, err_msg=self.name)
        else:
            np.testing.assert_allclose(got[finite], expected[finite], rtol=2**-7, err_msg=self.name)


def cases(widths: tuple[tuple[int, int], ...] = ((48, 16), (70, 7), (33, 33))) -> Iterator[Case]:
    """Yield every encoding for every element type, with several pairs of (width, dimensions), some of them odd."""
    for dtype in DTYPES:
        for width, dimensions in widths:
            for form in _forms(width, dimensions, dtype):
                for kind, make in _KINDS.items():
                    rng = np.random.default_rng(width)
                    vectors = rng.standard_normal((VECTORS, width)).astype(np.float32)
                    rows = make(rng, (3, 9, width)).astype(np.float32)
                    name = f"{kind} rows of {form}"
                    yield Case(name, form, torch.from_numpy(rows).to(dtype)[:, :5], vectors)


def _forms(width: int, dimensions: int, dtype: torch.dtype) -> Iterator[RowFormat]:
    for encoding in ENCODINGS.values():
        size = VECTORS if encoding == PROJECT else dimensions if encoding in SIZED else 0
        if encoding == SAE:
            yield RowFormat(encoding, width, WIRE_TYPES[dtype], min(dimensions, 100), features=110)
        else:
            yield RowFormat(encoding, width, WIRE_TYPES[dtype], size)
    yield RowFormat(FULL8, width, WIRE_TYPES[dtype], axis=BY_DIMENSION)


def _awkward(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Return rows with few different numbers, with zeros, with equal numbers, and with numbers that are not finite."""
    rows = rng.integers(-3, 4, size=shape).astype(np.float64)
    rows[0, 0] = 0.0
    rows[0, 1] = -1.5
    rows[0, 2] = rng.standard_normal(shape[2]) * 1e4
    rows[1, 0, 3] = np.nan
    rows[1, 1, [2, 5]] = np.inf, -np.inf
    rows[2, 4, ::2] = -0.0
    return rows


_KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int, int]], np.ndarray]] = {
    "random": lambda rng, shape: rng.standard_normal(shape) * 3,
    "awkward": _awkward,
}
