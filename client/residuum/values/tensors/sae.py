"""Sparse autoencoders: encoder, decoder and activation, with their arithmetic in numpy."""

from __future__ import annotations

import functools
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from residuum.exceptions import BadSAE
from residuum.v1 import sae_pb2
from residuum.values.tensors.numbers import without_torch
from residuum.values.tensors.vector import Vector
from residuum.values.tensors.weights import WEIGHT_DTYPES, float_numbers, read_only, weight_matrix
from residuum.wire import sae as arithmetic

FloatArray = npt.NDArray[np.float32]
Activation = Literal["relu", "jumprelu", "topk", "batchtopk"]

ACTIVATIONS: dict[str, sae_pb2.SAEActivation.ValueType] = {
    "relu": arithmetic.RELU,
    "jumprelu": arithmetic.JUMP_RELU,
    "topk": arithmetic.TOP_K,
    "batchtopk": arithmetic.JUMP_RELU,
}
"""The activations by name. With its threshold, "batchtopk" works as "jumprelu"."""


class SAE:
    """A sparse autoencoder: it describes a row of the model by a few of many features.

    `residuum.sae.load` reads one from a file. `Capture(..., encoding="sae", sae=...)` has the server compute the
    features while the model generates; `ClampFeature` changes a feature.

    A row x has the features f = activation(encoder n(x) + encoder_bias), where n is the layer norm or nothing. Its
    reconstruction is n⁻¹(decoder f + decoder_bias).

    Args:
        encoder: [features, width]. float32, float16 or bfloat16 is kept; other dtypes become float32.
        decoder: [features, width], of the same dtype. The directions of the features.
        encoder_bias: [features]; None: zeros.
        decoder_bias: [width]; None: zeros.
        activation: "relu"; "jumprelu" and "batchtopk", which need `threshold`; "topk", which needs `active`.
        threshold: A feature is 0 unless its output is above this. [features], or one number for all.
        active: How many features of a row may be above 0.
        subtracts_decoder_bias: Whether the encoder subtracts the decoder's bias from rows. This changes
            `encoder_bias`, so that the arithmetic is that of the formula above.
        layer_norm: Whether rows go through a layer norm first.

    Attributes:
        encoder: [features, width], read-only.
        decoder: [features, width], read-only.
        encoder_bias: float32 [features], read-only.
        decoder_bias: float32 [width], read-only.
        threshold: float32 [features], read-only; None without thresholds.
        activation: "relu", "jumprelu" or "topk".
        active: How many features of a row may be above 0; None without "topk".
        layer_norm: Whether rows go through a layer norm first.

    Raises:
        BadSAE: A shape, a dtype or a number cannot be used. The message says which.

    Example:
        >>> sae = residuum.sae.load("gpt2-small-res-jb/blocks.8.hook_resid_pre")
        >>> sae
        SAE(24576 features of 768 elements, relu, float32)
    """

    def __init__(
        self,
        encoder: npt.ArrayLike,
        decoder: npt.ArrayLike,
        *,
        encoder_bias: npt.ArrayLike | None = None,
        decoder_bias: npt.ArrayLike | None = None,
        activation: Activation = "relu",
        threshold: npt.ArrayLike | None = None,
        active: int | None = None,
        subtracts_decoder_bias: bool = False,
        layer_norm: bool = False,
    ) -> None:
        self.encoder = _matrix("encoder", encoder)
        self.decoder = _matrix("decoder", decoder, self.encoder.dtype)
        if self.decoder.shape != self.encoder.shape:
            raise _bad(
                f"The encoder is [{self.features}, {self.width}] and the decoder {list(self.decoder.shape)}. Both must "
                "be [features, width]; transpose one if its axes are the other way round."
            )
        if activation not in ACTIVATIONS:
            raise _bad(f"activation={activation!r} is unknown; use {', '.join(map(repr, ACTIVATIONS))}.")
        self.activation = "jumprelu" if activation == "batchtopk" else activation
        self.layer_norm = bool(layer_norm)
        self.decoder_bias = _numbers("decoder_bias", decoder_bias, self.width)
        bias = _numbers("encoder_bias", encoder_bias, self.features)
        if subtracts_decoder_bias:
            bias = self._folded(bias)
        self.encoder_bias = bias
        self.threshold: FloatArray | None = None
        if self.activation == "jumprelu":
            if threshold is None:
                raise _bad(f"activation={activation!r} needs threshold=.")
            self.threshold = _numbers("threshold", threshold, self.features)
        elif threshold is not None:
            raise _bad(f"activation={activation!r} has no threshold.")
        if (active is None) == (activation == "topk"):
            raise _bad('active= and activation="topk" belong together: give both or none.')
        if active is not None and not 1 <= active <= self.features:
            raise _bad(f"active={active} must be from 1 to {self.features}, the number of features.")
        self.active = None if active is None else int(active)
        try:
            self.shape = arithmetic.EncoderShape.of(self._header())
        except arithmetic.SAEHeaderError as error:
            raise _bad(f"The autoencoder cannot be used: {error}.") from None

    @property
    def features(self) -> int:
        """Number of features."""
        return int(self.encoder.shape[0])

    @property
    def width(self) -> int:
        """Elements of a row."""
        return int(self.encoder.shape[1])

    def encode(self, rows: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return the features of rows, [..., features]: float64 for float64 rows, otherwise float32.

        Args:
            rows: [..., width].

        Raises:
            BadSAE: The rows have another width.

        Example:
            >>> sae.encode(acts[12]).shape
            (69, 24576)
        """
        return arithmetic.Encoder(self.shape, self.encoder, self.encoder_bias, self.threshold).values(self._rows(rows))

    def decode(self, features: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return decoder features + decoder_bias, [..., width]. With `layer_norm`, these are normalized rows.

        Raises:
            BadSAE: There is another number of features.
        """
        f = np.asarray(without_torch(features))
        f = f if f.dtype == np.float64 else f.astype(np.float32)
        if f.shape[-1:] != (self.features,):
            raise _bad(f"decode takes [..., {self.features}], not {list(f.shape)}.")
        decoded: npt.NDArray[Any] = f @ self.decoder.astype(f.dtype) + self.decoder_bias.astype(f.dtype)
        return decoded

    def reconstruct(self, rows: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return what the autoencoder makes of rows [..., width], in their units."""
        x = self._rows(rows)
        decoded = self.decode(self.encode(x))
        if not self.layer_norm:
            return decoded
        scaled: npt.NDArray[Any] = decoded * x.std(axis=-1, ddof=1, keepdims=True) + x.mean(axis=-1, keepdims=True)
        return scaled

    def vector(self, feature: int) -> Vector:
        """Return the direction of a feature, its row of the decoder, for `Add` and other operations.

        Example:
            >>> client.generate("The weather is", steer=residuum.Add(sae.vector(123), layer=12, scale=8.0))
        """
        return Vector.from_array(self.decoder[self.check_feature(feature)].astype(np.float32))

    def astype(self, dtype: npt.DTypeLike) -> SAE:
        """Return the autoencoder with weights of another dtype: float32, float16 or bfloat16 (ml_dtypes.bfloat16).

        Sixteen bits halve what it takes on the server.
        """
        wanted = np.dtype(dtype)
        if wanted not in WEIGHT_DTYPES:
            raise _bad(f"Weights may be float32, float16 or bfloat16, not {wanted}.")
        return SAE(
            self.encoder.astype(wanted),
            self.decoder.astype(wanted),
            encoder_bias=self.encoder_bias,
            decoder_bias=self.decoder_bias,
            activation=cast("Activation", self.activation),
            threshold=self.threshold,
            active=self.active,
            layer_norm=self.layer_norm,
        )

    def check_feature(self, feature: int) -> int:
        """Return the number of a feature.

        Raises:
            BadSAE: There is no such feature.
        """
        if isinstance(feature, bool) or not hasattr(feature, "__index__"):
            raise TypeError(f"A feature must be a whole number, not {feature!r}.")
        number = int(feature)
        if not 0 <= number < self.features:
            raise _bad(
                f"The feature {number} does not exist: the autoencoder has the features 0 to {self.features - 1}."
            )
        return number

    @property
    def digest(self) -> bytes:
        """The SHA-256 that identifies the encoder, 32 bytes; sae.proto defines it. The decoder is no part of it."""
        return self.header.digest

    @functools.cached_property
    def header(self) -> sae_pb2.SAEHeader:
        """The message that describes the encoder, with its digest."""
        header = self._header()
        header.digest = self.shape.digest_of(self.parts())
        return header

    def parts(self) -> list[memoryview]:
        """Return the encoder's bytes, which follow each other: weights, biases, thresholds. Nothing is copied."""
        arrays = [self.encoder, self.encoder_bias, *([] if self.threshold is None else [self.threshold])]
        return [array.reshape(-1).view(np.uint8).data for array in arrays]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SAE):
            return NotImplemented
        same = self.digest == other.digest and self.decoder_bias.tobytes() == other.decoder_bias.tobytes()
        return same and np.array_equal(self.decoder, other.decoder)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        extra = f", {self.active} active" if self.active else ""
        extra += ", layer norm" if self.layer_norm else ""
        return f"SAE({self.features} features of {self.width} elements, {self.activation}{extra}, {self.encoder.dtype})"

    def _header(self) -> sae_pb2.SAEHeader:
        return sae_pb2.SAEHeader(
            features=self.features,
            width=self.width,
            dtype=WEIGHT_DTYPES[self.encoder.dtype],
            activation=ACTIVATIONS[self.activation],
            active=self.active or 0,
            normalization=arithmetic.LAYER_NORM if self.layer_norm else arithmetic.AS_IS,
        )

    def _folded(self, bias: FloatArray) -> FloatArray:
        """Return the bias of an encoder that subtracts the decoder's bias from rows."""
        shift = np.empty(self.features, np.float64)
        for first in range(0, self.features, _ROWS_AT_ONCE):  # float64 weights would take twice the memory
            part = slice(first, first + _ROWS_AT_ONCE)
            shift[part] = self.encoder[part].astype(np.float64) @ self.decoder_bias.astype(np.float64)
        return read_only((bias - shift).astype(np.float32))

    def _rows(self, rows: npt.ArrayLike) -> npt.NDArray[Any]:
        x = np.asarray(without_torch(rows))
        x = x if x.dtype == np.float64 else x.astype(np.float32)
        if x.shape[-1:] != (self.width,):
            raise _bad(f"The autoencoder takes rows of {self.width} elements, but these are {list(x.shape)}.")
        return x


_ROWS_AT_ONCE = 4096


def _matrix(name: str, values: npt.ArrayLike, dtype: np.dtype[Any] | None = None) -> npt.NDArray[Any]:
    return weight_matrix(name, values, _bad, shape="[features, width]", dtype=dtype)


def _numbers(name: str, values: npt.ArrayLike | None, length: int) -> FloatArray:
    return float_numbers(name, values, length, _bad)


def _bad(message: str) -> BadSAE:
    return BadSAE(message, reason="INVALID_FIELD")
