"""The arithmetic of sparse autoencoders in plain numpy, and the digest of an encoder. sae.proto defines both."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from residuum.v1 import sae_pb2
from residuum.wire.dtypes import item_bytes
from residuum.wire.limits import MAX_SAE_FEATURES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    import numpy.typing as npt

    from residuum.v1 import tensor_pb2

    Values = npt.NDArray[np.floating[Any]]

RELU = sae_pb2.SAE_ACTIVATION_RELU
JUMP_RELU = sae_pb2.SAE_ACTIVATION_JUMP_RELU
TOP_K = sae_pb2.SAE_ACTIVATION_TOP_K
NO_ACTIVATION = sae_pb2.SAE_ACTIVATION_NONE

AS_IS = sae_pb2.SAE_INPUT_AS_IS
LAYER_NORM = sae_pb2.SAE_INPUT_LAYER_NORM

LAYER_NORM_EPSILON = 1e-5
"""Added to the standard deviation of a row."""

NUMBER_BYTES = 4
"""Bytes of an element of a bias, a threshold or a value."""

_DOMAIN = b"residuum.sae.v1"


class SAEHeaderError(ValueError):
    """An encoder's header is inconsistent. The message says what is wrong."""


@dataclass(frozen=True)
class EncoderShape:
    """What a checked `SAEHeader` says, and the layout of the encoder's bytes."""

    features: int
    width: int
    dtype: tensor_pb2.DataType.ValueType
    """The element type of the weights."""
    activation: int
    active: int
    """For TOP_K, how many features of a row may be above 0; otherwise 0."""
    normalization: int

    @classmethod
    def of(cls, header: sae_pb2.SAEHeader) -> EncoderShape:
        """Return what a header says.

        Raises:
            SAEHeaderError: The header is inconsistent.
        """
        activation = header.activation
        normalization = header.normalization or AS_IS
        rules = (
            (1 <= header.features <= MAX_SAE_FEATURES, f"features is {header.features}; 1 to {MAX_SAE_FEATURES} fit"),
            (header.width >= 1, "width is 0"),
            (activation in (RELU, JUMP_RELU, TOP_K, NO_ACTIVATION), f"the activation {int(activation)} is unknown"),
            (normalization in (AS_IS, LAYER_NORM), f"the normalization {int(normalization)} is unknown"),
            (normalization != LAYER_NORM or header.width > 1, "rows of one element have no layer norm"),
            (
                (1 <= header.active <= header.features) if activation == TOP_K else not header.active,
                f"active is {header.active}; for TOP_K it is from 1 to features, otherwise 0",
            ),
        )
        for holds, message in rules:
            if not holds:
                raise SAEHeaderError(f"{message}")
        try:
            item_bytes(header.dtype)
        except ValueError as error:
            raise SAEHeaderError(str(error)) from None
        return cls(header.features, header.width, header.dtype, activation, header.active, normalization)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, [features, width]."""
        return self.features * self.width * item_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, the biases, and the thresholds of JUMP_RELU, in this order."""
        return self.weight_bytes + NUMBER_BYTES * self.features * (2 if self.activation == JUMP_RELU else 1)

    def begin_digest(self) -> hashlib._Hash:
        """Return the SHA-256 of an encoder, to which its bytes must be added."""
        numbers = (self.dtype, self.features, self.width, self.activation, self.active, self.normalization)
        return hashlib.sha256(_DOMAIN + struct.pack("<6I", *numbers))

    def digest_of(self, parts: Iterable[memoryview]) -> bytes:
        """Return the SHA-256 of the encoder whose bytes are `parts`, 32 bytes."""
        sha = self.begin_digest()
        for part in parts:
            sha.update(part)
        return sha.digest()


@dataclass(frozen=True)
class Encoder:
    """An encoder in memory, and which of its features are kept."""

    shape: EncoderShape
    weights: npt.NDArray[Any]
    """[features, width], of the shape's dtype."""
    biases: npt.NDArray[np.float32]
    """[features]."""
    threshold: npt.NDArray[np.float32] | None = None
    """[features]; None without JUMP_RELU."""
    chosen: tuple[int, ...] = ()
    """The features that are kept; empty: the strongest."""

    def values(self, rows: Values) -> Values:
        """Return all features of rows [..., width], in the rows' dtype, [..., features]."""
        outputs = normalized(rows, self.shape.normalization) @ self.weights.T.astype(rows.dtype)
        outputs += self.biases.astype(rows.dtype)
        return activate(outputs, self.shape.activation, self.threshold, self.shape.active)

    def kept(self, rows: Values, count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Return the numbers and the values of the kept features of rows: two arrays [..., count]."""
        values = self.values(rows)
        if not self.chosen:
            return strongest(values, count)
        numbers = np.broadcast_to(np.array(self.chosen, np.uint32), (*rows.shape[:-1], count))
        return numbers, values[..., list(self.chosen)].astype(np.float32)


def normalized(rows: Values, normalization: int) -> Values:
    """Return rows [..., width] as an encoder takes them."""
    if normalization != LAYER_NORM:
        return rows
    centered = rows - rows.mean(axis=-1, keepdims=True)
    scaled: Values = centered / (rows.std(axis=-1, ddof=1, keepdims=True) + rows.dtype.type(LAYER_NORM_EPSILON))
    return scaled


def activate(
    outputs: Values,
    activation: int,
    threshold: npt.NDArray[np.float32] | None = None,
    active: int = 0,
) -> Values:
    """Return the features [..., features] of an encoder's outputs (weights @ row + bias).

    Of equal outputs, TOP_K takes those of lower numbers.
    """
    if activation == NO_ACTIVATION:
        return outputs
    values: Values = np.maximum(outputs, 0)  # keeps NaN
    if activation == JUMP_RELU:
        assert threshold is not None, "jumprelu needs thresholds"  # noqa: S101
        return np.where(outputs <= threshold, values.dtype.type(0), values)
    if activation == TOP_K:
        order = _falling(outputs)[..., active:]
        values = values.copy()
        np.put_along_axis(values, order, 0, axis=-1)
    return values


def strongest(values: Values, count: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Return the numbers and the values of the strongest features, in falling order: two arrays [..., count].

    If fewer are above 0, the rest have the number `values.shape[-1]`, which is no feature, and the value 0. NaN ranks
    above all numbers.
    """
    order = _falling(values)[..., :count]
    kept = np.take_along_axis(values, order, axis=-1).astype(np.float32)
    return np.where(kept == 0, values.shape[-1], order).astype(np.uint32), kept


def _falling(values: Values) -> npt.NDArray[np.int64]:
    """Return the order of values, the largest first and NaN before it. Of equal values, the first counts."""
    order = np.argsort(-values, axis=-1, kind="stable")  # NaN comes last
    is_number = ~np.isnan(np.take_along_axis(values, order, axis=-1))
    return np.take_along_axis(order, np.argsort(is_number, axis=-1, kind="stable"), axis=-1)
