"""The encodings that are measured."""

from __future__ import annotations

from dataclasses import dataclass

from residuum.v1 import capture_pb2, tensor_pb2
from residuum.wire.rows.encodings import (
    BF16,
    BY_DIMENSION,
    FP16,
    FP32,
    FULL8,
    PROJECT,
    RANDOM_PROJECTIONS,
    RAW,
    RP,
    RP8,
    SIZED,
    TOPK,
    TOPK8,
    RowFormat,
)

SEED = 0
"""The seed of all random projections here."""


@dataclass(frozen=True)
class Case:
    """An encoding with its parameters, for rows of any width."""

    name: str
    encoding: capture_pb2.Encoding.ValueType
    dimensions: int = 0
    axis: capture_pb2.QuantizationAxis.ValueType = 0  # type: ignore[assignment] # unset

    def form(self, width: int, dtype: tensor_pb2.DataType.ValueType) -> RowFormat:
        """Return the format of rows with this width and dtype."""
        dimensions = min(self.dimensions, width) if self.encoding in SIZED else self.dimensions
        return RowFormat(self.encoding, width, dtype, dimensions, self.axis)

    @property
    def projects(self) -> bool:
        """Whether the encoding is a random projection."""
        return self.encoding in RANDOM_PROJECTIONS


CASES = (
    Case("raw", RAW),
    Case("fp32", FP32),
    Case("fp16", FP16),
    Case("bf16", BF16),
    Case("full8", FULL8),
    Case("full8, dimension", FULL8, axis=BY_DIMENSION),
    Case("rp 512", RP, 512),
    Case("rp8 512", RP8, 512),
    Case("rp8 256", RP8, 256),
    Case("rp8 128", RP8, 128),
    Case("topk 128", TOPK, 128),
    Case("topk8 128", TOPK8, 128),
    Case("topk8 32", TOPK8, 32),
    Case("project 8", PROJECT, 8),
)
"""All encodings. Those with dimensions have their default size and smaller sizes."""
