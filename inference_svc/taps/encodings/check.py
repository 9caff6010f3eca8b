"""The startup check of the encoders: on this device, width and dtype, they must agree with the reference in numpy.

The check also compiles the GPU kernels, so that the first request does not wait for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inference_svc.taps.element_types import WIRE_TYPES
from inference_svc.taps.encodings.sae_encoder import encoder_of
from inference_svc.taps.errors import UnsupportedEngineError
from residuum.v1 import capture_pb2, sae_pb2, tensor_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.limits import DEFAULT_KEPT_FEATURES, DEFAULT_PROJECTION, DEFAULT_TOPK
from residuum.wire.rows.encodings import (
    BY_DIMENSION,
    BY_ROW,
    ENCODINGS,
    LARGEST,
    MAX_INDEXED_WIDTH,
    PROJECT,
    RANDOM_PROJECTIONS,
    SAE,
    RowFormat,
    basis_of,
)
from residuum.wire.sae import JUMP_RELU, RELU, Encoder, EncoderShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.taps.encodings.bases import Basis
    from inference_svc.taps.encodings.signs import SignCache

    Encode = Callable[[Tensor, RowFormat, Basis | None], npt.NDArray[np.uint8]]
    """Encodes rows [units, positions, width] with a basis."""

_UNITS, _POSITIONS, _VECTORS, _FEATURES = 2, (3, 16), 5, 96
_DIMENSIONS = {**dict.fromkeys(RANDOM_PROJECTIONS, DEFAULT_PROJECTION), **dict.fromkeys(LARGEST, DEFAULT_TOPK)}
_NO_AXIS = capture_pb2.QUANTIZATION_AXIS_UNSPECIFIED
_SUMS_MATCH = 1e-6
"""The largest difference of float32 sums that are added in different orders: relative to the largest sum, and divided
by the square root of the width. Sums of numbers rounded to TF32 differ by more."""


class CannotEncodeError(UnsupportedEngineError):
    """The encoders of this device do not agree with the reference."""


def check_encodings(
    width: int, dtype: torch.dtype, device: torch.device, signs: SignCache, encode: Encode, *, with_saes: bool
) -> None:
    """Encode known rows in every encoding, and compare the bytes with the reference.

    Args:
        width: Elements of a row.
        dtype: The model's dtype.
        device: The model's device.
        signs: The signs of random projections.
        encode: The encoder.
        with_saes: Whether captures may keep features of sparse autoencoders.

    Raises:
        CannotEncodeError: The bytes differ.
    """
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((_VECTORS, width)).astype(np.float32)
    saes = [_sae(width, activation, rng) for activation in (RELU, JUMP_RELU)]  # GPUs have a kernel for each
    for form, sae in _forms(width, dtype, saes if with_saes else ()):
        for positions in _POSITIONS:
            rows = torch.from_numpy(rng.standard_normal((_UNITS, positions, width)).astype(np.float32)).to(dtype)
            basis: Basis | None = torch.from_numpy(vectors).to(device) if form.encoding == PROJECT else None
            if sae is not None:
                basis = encoder_of(torch.from_numpy(bytes_of(sae)).to(device), sae.shape)
            if form.encoding in RANDOM_PROJECTIONS:
                basis = signs.get(0, form.dimensions, dtype if device.type == "cuda" else torch.float32)
            encoded = encode(rows.to(device), form, basis)
            values = rows.view(torch.uint8).numpy().view(numpy_dtype(form.dtype))
            if sae is not None:
                same = _same_features(form, encoded, values, sae)
            else:
                expected = form.encode(values, basis_of(form, capture_pb2.EncodingOptions(), list(vectors)))
                same = _same(form, encoded, np.frombuffer(expected, dtype=np.uint8), positions)
            if not same:
                raise CannotEncodeError(
                    f"Rows encoded as {form} on {device} are not what the contract says (capture.proto): this version "
                    "of torch or Triton computes them differently. Use the versions that residuum was tested with "
                    "(see pyproject.toml)."
                )


def _forms(width: int, dtype: torch.dtype, saes: Sequence[Encoder]) -> Iterator[tuple[RowFormat, Encoder | None]]:
    """Yield every format, and the encoder of a sparse autoencoder that it takes."""
    for encoding in ENCODINGS.values():
        if encoding in LARGEST and width > MAX_INDEXED_WIDTH:
            continue
        if encoding == SAE:
            form = RowFormat(encoding, width, WIRE_TYPES[dtype], DEFAULT_KEPT_FEATURES, features=_FEATURES)
            yield from ((form, sae) for sae in saes)
            continue
        dimensions = _VECTORS if encoding == PROJECT else min(_DIMENSIONS.get(encoding, 0), width)
        for axis in (BY_ROW, BY_DIMENSION) if encoding == capture_pb2.ENCODING_FULL8 else (_NO_AXIS,):
            yield RowFormat(encoding, width, WIRE_TYPES[dtype], dimensions, axis), None


def _sae(width: int, activation: sae_pb2.SAEActivation.ValueType, rng: np.random.Generator) -> Encoder:
    """Return an encoder of many features that fire. No threshold is near an output, whose sum may be rounded."""
    header = sae_pb2.SAEHeader(
        features=_FEATURES, width=width, dtype=tensor_pb2.DATA_TYPE_FLOAT32, activation=activation
    )
    weights = rng.standard_normal((_FEATURES, width)).astype(np.float32)
    biases = rng.standard_normal(_FEATURES).astype(np.float32)
    threshold = np.where(np.arange(_FEATURES) % 3, -1e9, 1e9).astype(np.float32) if activation == JUMP_RELU else None
    return Encoder(EncoderShape.of(header), weights, biases, threshold)


def bytes_of(encoder: Encoder) -> npt.NDArray[np.uint8]:
    """Return the bytes of an encoder as sae.proto says."""
    parts = [encoder.weights, encoder.biases, *([] if encoder.threshold is None else [encoder.threshold])]
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def _same_features(form: RowFormat, encoded: npt.NDArray[np.uint8], values: npt.NDArray[Any], encoder: Encoder) -> bool:
    """Return whether the kept features are the strongest, each once with its value. Sums may be added in any order."""
    exact = encoder.values(values.astype(np.float32))
    kept = form.split(encoded, *values.shape[:2])[1]
    numbers = np.sort(kept["feature"], axis=-1).astype(np.int64)
    is_twice = (numbers[..., 1:] == numbers[..., :-1]) & (numbers[..., 1:] < form.features)
    is_none = kept["feature"] == form.features
    if numbers.max() > form.features or is_twice.any() or (is_none != (kept["value"] == 0)).any():
        return False
    wanted = -np.sort(-exact, axis=-1)[..., : form.dimensions]
    bound = _SUMS_MATCH * np.sqrt(form.width) * float(np.abs(exact).max())
    padded = np.concatenate([exact, np.zeros((*exact.shape[:2], 1), exact.dtype)], axis=-1)
    own = np.take_along_axis(padded, kept["feature"].astype(np.int64), axis=-1)
    return bool(max(np.abs(kept["value"] - wanted).max(), np.abs(kept["value"] - own).max()) <= bound)


def _same(form: RowFormat, encoded: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8], positions: int) -> bool:
    """Return whether rows agree: bit by bit, except for projections, whose sums may be added in any order."""
    if form.encoding not in RANDOM_PROJECTIONS | {PROJECT}:
        return np.array_equal(encoded, expected)
    ours, reference = (form.split(payload, _UNITS, positions)[1] for payload in (encoded, expected))
    bound = _SUMS_MATCH * np.sqrt(form.width) * float(np.abs(form.decode(reference)).max())
    if form.encoding == capture_pb2.ENCODING_RP8:
        bound += 1.01 * float(reference["scale"].max())  # a slightly different sum may round to the next integer
    return bool(np.abs(form.decode(ours) - form.decode(reference)).max() <= bound)
