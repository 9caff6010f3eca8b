"""Encodings of rows: their byte layout, encoding and decoding. capture.proto defines the layouts.

`RowFormat.encode` is the reference encoder in plain numpy, for tests, tools and authors of other encoders. The
inference service encodes captured rows on its device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from residuum.v1 import capture_pb2, tensor_pb2
from residuum.wire.dtypes import dtype_name, numpy_dtype
from residuum.wire.limits import DEFAULT_KEPT_FEATURES, MAX_KEPT_FEATURES, MAX_SAE_FEATURES
from residuum.wire.rows.projection import projection_matrix
from residuum.wire.sae import Encoder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

    import numpy.typing as npt

    Basis: TypeAlias = npt.NDArray[np.float32] | Encoder

RAW = capture_pb2.ENCODING_RAW
FP32 = capture_pb2.ENCODING_FP32
FP16 = capture_pb2.ENCODING_FP16
BF16 = capture_pb2.ENCODING_BF16
FULL8 = capture_pb2.ENCODING_FULL8
RP8 = capture_pb2.ENCODING_RP8
TOPK8 = capture_pb2.ENCODING_TOPK8
RP = capture_pb2.ENCODING_RP
TOPK = capture_pb2.ENCODING_TOPK
PROJECT = capture_pb2.ENCODING_PROJECT
SAE = capture_pb2.ENCODING_SAE

ENCODINGS: dict[str, capture_pb2.Encoding.ValueType] = {
    "raw": RAW,
    "fp32": FP32,
    "fp16": FP16,
    "bf16": BF16,
    "full8": FULL8,
    "rp8": RP8,
    "topk8": TOPK8,
    "rp": RP,
    "topk": TOPK,
    "project": PROJECT,
    "sae": SAE,
}
"""The encodings by name."""

ENCODING_NAMES = {number: name for name, number in ENCODINGS.items()}

RANDOM_PROJECTIONS = frozenset({RP, RP8})
"""Encodings by random projection, which have dimensions and a seed."""

LARGEST = frozenset({TOPK, TOPK8})
"""Encodings that keep the elements of greatest magnitude; their dimensions are the number of elements."""

SIZED = RANDOM_PROJECTIONS | LARGEST
"""Encodings whose dimensions a request may choose."""

NOT_ROWS = RANDOM_PROJECTIONS | {PROJECT, SAE}
"""Encodings that decode to something else than the row, even if it is as wide."""

BY_ROW = capture_pb2.QUANTIZATION_AXIS_ROW
BY_DIMENSION = capture_pb2.QUANTIZATION_AXIS_DIMENSION

MAX_INDEXED_WIDTH = 1 << 16
"""The widest row whose elements a 16-bit index can address."""

_CASTS = {FP32: np.dtype("<f4"), FP16: np.dtype("<f2"), BF16: np.dtype(ml_dtypes.bfloat16)}
_LEVELS = np.float32(255)


class EncodingError(ValueError):
    """The encoding, width, element type and options are inconsistent, or do not match the data."""


@dataclass(frozen=True)
class RowFormat:
    """The layout of the rows in a chunk's payload, and how to decode them.

    For each layer, a payload has one *prefix*, if the format has prefixes, and then one *row* per position. Both are
    numpy structures with the fields of the table in capture.proto: "x", "y", "q", "scale", "zero" and "index".

    Example:
        >>> form = RowFormat(RP8, width=2048, dtype=DATA_TYPE_BFLOAT16, dimensions=512)
        >>> form.row_bytes
        520
        >>> prefixes, rows = form.split(payload, layers=36, positions=32)
        >>> rows["q"].shape, form.decode(rows, prefixes).shape
        ((36, 32, 512), (36, 32, 512))
    """

    encoding: capture_pb2.Encoding.ValueType
    """The encoding."""
    width: int
    """Elements of a row as the model computed it."""
    dtype: tensor_pb2.DataType.ValueType
    """The element type in which the model computed the row."""
    dimensions: int = 0
    """Numbers in an encoded row, for encodings that shorten rows; 0 for the others."""
    axis: capture_pb2.QuantizationAxis.ValueType = capture_pb2.QUANTIZATION_AXIS_UNSPECIFIED
    """FULL8: which numbers share a scale; unset means those of a row."""
    features: int = 0
    """SAE: the number of features of the encoder; 0 for the others."""

    def __str__(self) -> str:
        extra = f" of {self.dimensions} dimensions" if self.dimensions else ""
        extra += f" among {self.features} features" if self.features else ""
        extra += " along dimensions" if self._by_dimension else ""
        return f"{ENCODING_NAMES[self.encoding]}{extra}, {self.width} elements of {dtype_name(self.dtype)}"

    def __post_init__(self) -> None:
        if self.encoding == capture_pb2.ENCODING_UNSPECIFIED:
            object.__setattr__(self, "encoding", RAW)
        if self.encoding not in ENCODING_NAMES:
            raise EncodingError(f"unknown encoding {int(self.encoding)}; known: {', '.join(ENCODINGS)}")
        if self.encoding == FULL8:
            object.__setattr__(self, "axis", self.axis or BY_ROW)
        numpy_dtype(self.dtype)
        self._check(ENCODING_NAMES[self.encoding])

    def _check(self, name: str) -> None:
        rules = (
            (self.width >= 1, "a row needs at least one element"),
            (
                self.encoding not in SIZED or 1 <= self.dimensions <= self.width,
                f"{name} takes 1 to {self.width} dimensions, not {self.dimensions}: rows have {self.width} elements",
            ),
            (self.encoding != PROJECT or self.dimensions >= 1, "project needs at least one vector"),
            (self.encoding in SIZED | {PROJECT, SAE} or not self.dimensions, f"{name} takes no dimensions"),
            (self.encoding == SAE or not self.features, f"{name} has no features"),
            (
                self.encoding != SAE or 1 <= self.features <= MAX_SAE_FEATURES,
                f"an autoencoder has 1 to {MAX_SAE_FEATURES} features, not {self.features}",
            ),
            (
                self.encoding != SAE or 1 <= self.dimensions <= min(self.features, MAX_KEPT_FEATURES),
                f"sae keeps 1 to {min(self.features, MAX_KEPT_FEATURES)} features of a row, not {self.dimensions}",
            ),
            (self.axis in capture_pb2.QuantizationAxis.values(), f"unknown quantization axis {int(self.axis)}"),
            (self.encoding == FULL8 or not self.axis, f"{name} takes no quantization axis; only full8 does"),
            (
                self.encoding not in LARGEST or self.width <= MAX_INDEXED_WIDTH,
                f"{name} takes rows of at most {MAX_INDEXED_WIDTH} elements, not {self.width}",
            ),
        )
        for holds, message in rules:
            if not holds:
                raise EncodingError(message)

    @classmethod
    def of(cls, header: capture_pb2.ChunkHeader) -> RowFormat:
        """Return the format of a chunk.

        Raises:
            EncodingError: The header's fields are inconsistent.
            ValueError: The element type is unknown.
        """
        return row_format(header.encoding, header.width, header.dtype, header.dimensions, header.axis, header.features)

    @classmethod
    def of_capture(
        cls, description: capture_pb2.CaptureDescription, site: capture_pb2.Site.ValueType | None = None
    ) -> RowFormat:
        """Return the format of all chunks of a capture at a site; None: at its first site.

        Raises:
            EncodingError: The capture's encoding options are inconsistent.
            ValueError: The element type is unknown.
        """
        spec, options = description.spec, description.spec.encoding_options
        return row_format(
            spec.encoding,
            site_width(description, site),
            description.dtype,
            options.dimensions or len(options.vectors),
            options.axis,
            options.sae.features,
        )

    @functools.cached_property
    def row_dtype(self) -> np.dtype[Any]:
        """The dtype of an encoded row, without padding."""
        own, k, width = numpy_dtype(self.dtype), self.dimensions, self.width
        scaled: list[Any] = [("scale", "<f4"), ("zero", "<f4")]
        fields: dict[int, list[Any]] = {
            RAW: [("x", own, (width,))],
            **{cast: [("x", dtype, (width,))] for cast, dtype in _CASTS.items()},
            FULL8: [*([] if self._by_dimension else scaled), ("q", "u1", (width,))],
            RP8: [*scaled, ("q", "u1", (k,))],
            TOPK8: [*scaled, ("index", "<u2", (k,)), ("q", "u1", (k,))],
            RP: [("y", "<f4", (k,))],
            TOPK: [("index", "<u2", (k,)), ("x", own, (k,))],
            PROJECT: [("y", "<f4", (k,))],
            SAE: [("feature", "<u4", (k,)), ("value", "<f4", (k,))],
        }
        return np.dtype(fields[self.encoding])

    @functools.cached_property
    def prefix_dtype(self) -> np.dtype[Any] | None:
        """The dtype of the prefix before a layer's rows, without padding; None if there is no prefix."""
        if not self._by_dimension:
            return None
        return np.dtype([("scale", "<f4", (self.width,)), ("zero", "<f4", (self.width,))])

    @property
    def is_plain(self) -> bool:
        """Whether a row is just its elements, one after the other: RAW and the casts."""
        return self.encoding == RAW or self.encoding in _CASTS

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row."""
        return self.row_dtype.itemsize

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the prefix before a layer's rows."""
        return self.prefix_dtype.itemsize if self.prefix_dtype is not None else 0

    @property
    def decoded_width(self) -> int:
        """Elements of a decoded row."""
        if self.encoding == SAE:
            return self.features
        return self.dimensions if self.encoding in RANDOM_PROJECTIONS | {PROJECT} else self.width

    @property
    def decodes_to_rows(self) -> bool:
        """Whether decoded rows are those of the model, apart from what the encoding loses."""
        return self.encoding not in NOT_ROWS

    @property
    def decoded_dtype(self) -> np.dtype[Any]:
        """The dtype of decoded rows: the model's for RAW, the cast's for casts, otherwise float32."""
        return numpy_dtype(self.dtype) if self.encoding == RAW else _CASTS.get(self.encoding, np.dtype("<f4"))

    def payload_bytes(self, layers: int, positions: int) -> int:
        """Return the bytes of a payload."""
        return layers * (self.prefix_bytes + positions * self.row_bytes)

    def split(
        self, payload: npt.ArrayLike | bytes | memoryview, layers: int, positions: int
    ) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]:
        """Return views of a payload's prefixes [layers], or None, and of its rows [layers, positions].

        Raises:
            EncodingError: The payload's length does not match.
        """
        data = np.frombuffer(payload, dtype=np.uint8)  # type: ignore[arg-type]
        if len(data) != self.payload_bytes(layers, positions):
            described = self.payload_bytes(layers, positions)
            raise EncodingError(
                f"{layers} layers of {positions} positions take {described} bytes, but the payload has {len(data)}"
            )
        if self.prefix_dtype is None:
            return None, data.view(self.row_dtype).reshape(layers, positions)
        by_layer = data.view([("prefix", self.prefix_dtype), ("rows", self.row_dtype, (positions,))])
        return by_layer["prefix"], by_layer["rows"]

    def decode(self, rows: npt.NDArray[Any], prefixes: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return decoded rows: `decoded_dtype` [..., decoded_width].

        Args:
            rows: Encoded rows of `row_dtype`, of any shape [...].
            prefixes: For formats with a `prefix_dtype`, the rows' prefixes, of a shape that broadcasts to [...].

        Raises:
            EncodingError: See `check`.
        """
        if self.is_plain:
            return rows["x"]
        if self.encoding in (RP, PROJECT):
            return rows["y"]
        if self.encoding in LARGEST:
            return self._decode_largest(rows)
        if self.encoding == SAE:
            return self._decode_features(rows)
        if self._by_dimension:
            assert prefixes is not None, "rows quantised along dimensions need their prefixes"  # noqa: S101
            return _dequantized(rows["q"], prefixes["scale"], prefixes["zero"])
        return _dequantized(rows["q"], rows["scale"][..., None], rows["zero"][..., None])

    def check(self, rows: npt.NDArray[Any]) -> None:
        """Check that rows can be decoded: every index must be less than the width, or than the number of features.

        Raises:
            EncodingError: An index is too large.
        """
        if self.encoding == SAE and rows.size and int(rows["feature"].max()) > self.features:
            feature = int(rows["feature"].max())
            raise EncodingError(f"an encoded row has the feature {feature}, but there are only {self.features}")
        if self.encoding in LARGEST and rows.size and int(rows["index"].max()) >= self.width:
            index = int(rows["index"].max())
            raise EncodingError(f"an encoded row has the index {index}, but only {self.width} elements")

    def encode(self, values: npt.NDArray[Any], basis: Basis | None = None) -> bytes:
        """Return the payload of rows. This is the reference for every encoder.

        Args:
            values: The rows in the model's dtype, [layers, positions, width]. The rows of a layer are encoded together.
            basis: The matrix that rows are multiplied with, float32 [width, dimensions]; see `basis_of`. For SAE, the
                encoder.

        Raises:
            EncodingError: The values do not have the format's width and dtype.
        """
        own = numpy_dtype(self.dtype)
        if values.shape[2:] != (self.width,) or values.dtype != own:
            raise EncodingError(
                f"rows must be [layers, positions, {self.width}] of {own}, not {values.shape} of {values.dtype}"
            )
        with np.errstate(all="ignore"):  # values that are not finite are marked in the encoded rows
            payload = np.zeros(self.payload_bytes(*values.shape[:2]), dtype=np.uint8)
            prefixes, rows = self.split(payload, *values.shape[:2])
            self._encode_into(prefixes, rows, values, basis)
        return payload.tobytes()

    @property
    def _by_dimension(self) -> bool:
        return self.encoding == FULL8 and self.axis == BY_DIMENSION

    def _encode_into(
        self,
        prefixes: npt.NDArray[Any] | None,
        rows: npt.NDArray[Any],
        values: npt.NDArray[Any],
        basis: Basis | None,
    ) -> None:
        if isinstance(basis, Encoder):
            rows["feature"], rows["value"] = basis.kept(values.astype(np.float32), self.dimensions)
        elif self.is_plain:
            rows["x"] = values.astype(rows["x"].dtype)
        elif self.encoding in LARGEST:
            self._encode_largest(rows, values)
        elif prefixes is not None:
            prefixes["scale"], prefixes["zero"], q = _quantized(np.swapaxes(values.astype(np.float32), 1, 2))
            rows["q"] = np.swapaxes(q, 1, 2)
        elif self.encoding == FULL8:
            rows["scale"], rows["zero"], rows["q"] = _quantized(values.astype(np.float32))
        else:
            assert basis is not None, "a projection needs its basis"  # noqa: S101
            projected = values.astype(np.float32) @ basis
            if self.encoding == RP8:
                rows["scale"], rows["zero"], rows["q"] = _quantized(projected)
            else:
                rows["y"] = projected

    def _encode_largest(self, rows: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        rows["index"] = index = largest(values, self.dimensions)
        kept = np.take_along_axis(values, index, axis=-1)
        if self.encoding == TOPK:
            rows["x"] = kept
            return
        rows["scale"], rows["zero"], rows["q"] = _quantized(kept.astype(np.float32))
        rows["index"][np.isnan(rows["scale"])] = np.arange(self.dimensions)

    def _decode_largest(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        self.check(rows)
        whole = np.zeros((*rows.shape, self.width), dtype=np.float32)
        if self.encoding == TOPK:
            kept = rows["x"].astype(np.float32)
        else:
            kept = _dequantized(rows["q"], rows["scale"][..., None], rows["zero"][..., None])
            whole[np.isnan(rows["scale"])] = np.nan
        np.put_along_axis(whole, rows["index"].astype(np.int64), kept, axis=-1)
        return whole

    def _decode_features(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        self.check(rows)
        # One more column, for the number that is no feature.
        whole = np.zeros((*rows.shape, self.features + 1), dtype=np.float32)
        np.put_along_axis(whole, rows["feature"].astype(np.int64), rows["value"], axis=-1)
        return whole[..., :-1]


def kept_features(options: capture_pb2.EncodingOptions) -> int:
    """Return how many features of a row a capture with ENCODING_SAE keeps."""
    chosen = len(options.sae.chosen)
    return options.dimensions or chosen or min(DEFAULT_KEPT_FEATURES, options.sae.features)


def basis_of(
    form: RowFormat, options: capture_pb2.EncodingOptions, vectors: Sequence[npt.NDArray[np.float32]] = ()
) -> npt.NDArray[np.float32] | None:
    """Return the matrix that a format multiplies rows with, float32 [width, dimensions]; None for most formats.

    Args:
        form: The format.
        options: The capture's encoding options, with the seed of a random projection.
        vectors: For PROJECT, the vectors, each float32 [width].
    """
    if form.encoding in RANDOM_PROJECTIONS:
        return projection_matrix(options.seed, form.width, form.dimensions)
    return np.stack(vectors, axis=1) if form.encoding == PROJECT else None


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the elements of greatest magnitude, ascending: int64 [..., count].

    Among equal magnitudes, lower indices win. NaN ranks above infinity, and infinity above all finite numbers.
    """
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    magnitude = np.ascontiguousarray(values).view(unsigned) & unsigned.type((1 << (8 * unsigned.itemsize - 1)) - 1)
    order = np.argsort(~magnitude, axis=-1, kind="stable")
    return np.sort(order[..., :count], axis=-1).astype(np.int64)


def site_width(description: capture_pb2.CaptureDescription, site: capture_pb2.Site.ValueType | None = None) -> int:
    """Return the elements of a captured row at a site, as the model computed it; None: at the capture's first site.

    Raises:
        EncodingError: The capture does not have the site.
    """
    if not description.site_widths:
        return description.hidden_size
    sites = list(description.spec.sites)
    if (site is not None and site not in sites) or len(sites) != len(description.site_widths):
        raise EncodingError(f"the width of rows at the site {site} is not known")
    return description.site_widths[0 if site is None else sites.index(site)]


@functools.lru_cache(maxsize=64)
def row_format(
    encoding: capture_pb2.Encoding.ValueType,
    width: int,
    dtype: tensor_pb2.DataType.ValueType,
    dimensions: int,
    axis: capture_pb2.QuantizationAxis.ValueType,
    features: int,
) -> RowFormat:
    """Return the format with these fields: the same object for equal ones, while it is kept."""
    return RowFormat(encoding, width, dtype, dimensions, axis, features)


def _quantized(
    values: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Return scale [...], zero [...] and q [..., n] of numbers [..., n]. Those along the last axis share a scale."""
    zero = values.min(axis=-1, keepdims=True)
    scale = (values.max(axis=-1, keepdims=True) - zero) / _LEVELS
    steps = np.divide(values - zero, scale, out=np.zeros_like(values), where=(scale > 0) & np.isfinite(scale))
    q = np.clip(np.rint(steps), 0, 255).astype(np.uint8)
    finite = np.isfinite(scale)
    scale, zero = (np.where(finite, numbers, np.float32(np.nan)) for numbers in (scale, zero))
    return scale[..., 0], zero[..., 0], q


def _dequantized(
    q: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32], zero: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    values = q.astype(np.float32)
    values *= scale
    values += zero
    return values
