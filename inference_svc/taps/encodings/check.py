"""The startup check of the encoders: on this device, width and dtype, they must agree with the reference in numpy.

The check also compiles the GPU kernels, so that the first request does not wait for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.vllm.limits import UnsupportedEngineError
from residuum.v1 import capture_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.encodings import (
    BY_DIMENSION,
    BY_ROW,
    ENCODINGS,
    LARGEST,
    MAX_INDEXED_WIDTH,
    PROJECT,
    RANDOM_PROJECTIONS,
    RowFormat,
    basis_of,
)
from residuum.wire.limits import DEFAULT_PROJECTION, DEFAULT_TOPK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.encodings.signs import SignCache

    Encode = Callable[[Tensor, RowFormat, Tensor | None], npt.NDArray[np.uint8]]
    """Encodes rows [units, positions, width] with a basis."""

_UNITS, _POSITIONS, _VECTORS = 2, (3, 16), 5
_DIMENSIONS = {**dict.fromkeys(RANDOM_PROJECTIONS, DEFAULT_PROJECTION), **dict.fromkeys(LARGEST, DEFAULT_TOPK)}
_NO_AXIS = capture_pb2.QUANTIZATION_AXIS_UNSPECIFIED
_SUMS_MATCH = 1e-6
"""The largest difference of float32 sums that are added in different orders: relative to the largest sum, and divided
by the square root of the width. Sums of numbers rounded to TF32 differ by more."""


class CannotEncodeError(UnsupportedEngineError):
    """The encoders of this device do not agree with the reference."""


def check_encodings(width: int, dtype: torch.dtype, device: torch.device, signs: SignCache, encode: Encode) -> None:
    """Encode known rows in every encoding, and compare the bytes with the reference.

    Args:
        width: Elements of a row.
        dtype: The model's dtype.
        device: The model's device.
        signs: The signs of random projections.
        encode: The encoder.

    Raises:
        CannotEncodeError: The bytes differ.
    """
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((_VECTORS, width)).astype(np.float32)
    for form in _forms(width, dtype):
        for positions in _POSITIONS:
            rows = torch.from_numpy(rng.standard_normal((_UNITS, positions, width)).astype(np.float32)).to(dtype)
            basis = torch.from_numpy(vectors).to(device) if form.encoding == PROJECT else None
            if form.encoding in RANDOM_PROJECTIONS:
                basis = signs.get(0, form.dimensions, dtype if device.type == "cuda" else torch.float32)
            encoded = encode(rows.to(device), form, basis)
            values = rows.view(torch.uint8).numpy().view(numpy_dtype(form.dtype))
            reference = basis_of(form, capture_pb2.EncodingOptions(), list(vectors))
            expected = np.frombuffer(form.encode(values, reference), dtype=np.uint8)
            if not _same(form, encoded, expected, positions):
                raise CannotEncodeError(
                    f"Rows encoded as {form} on {device} are not what the contract says (capture.proto): this version "
                    "of torch or Triton computes them differently. Use the versions that residuum was tested with "
                    "(see pyproject.toml)."
                )


def _forms(width: int, dtype: torch.dtype) -> Iterator[RowFormat]:
    for encoding in ENCODINGS.values():
        if encoding in LARGEST and width > MAX_INDEXED_WIDTH:
            continue
        dimensions = _VECTORS if encoding == PROJECT else min(_DIMENSIONS.get(encoding, 0), width)
        for axis in (BY_ROW, BY_DIMENSION) if encoding == capture_pb2.ENCODING_FULL8 else (_NO_AXIS,):
            yield RowFormat(encoding, width, WIRE_TYPES[dtype], dimensions, axis)


def _same(form: RowFormat, encoded: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8], positions: int) -> bool:
    """Return whether rows agree: bit by bit, except for projections, whose sums may be added in any order."""
    if form.encoding not in RANDOM_PROJECTIONS | {PROJECT}:
        return np.array_equal(encoded, expected)
    ours, reference = (form.split(payload, _UNITS, positions)[1] for payload in (encoded, expected))
    bound = _SUMS_MATCH * np.sqrt(form.width) * float(np.abs(form.decode(reference)).max())
    if form.encoding == capture_pb2.ENCODING_RP8:
        bound += 1.01 * float(reference["scale"].max())  # a slightly different sum may round to the next integer
    return bool(np.abs(form.decode(ours) - form.decode(reference)).max() <= bound)
