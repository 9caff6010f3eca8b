"""Element types: conversion between torch's dtypes and those of the wire format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from residuum.v1 import capture_pb2, tensor_pb2

if TYPE_CHECKING:
    from residuum.wire.rows.encodings import RowFormat

WIRE_TYPES = {
    torch.float32: tensor_pb2.DATA_TYPE_FLOAT32,
    torch.float16: tensor_pb2.DATA_TYPE_FLOAT16,
    torch.bfloat16: tensor_pb2.DATA_TYPE_BFLOAT16,
}
"""The wire type of each torch dtype."""

TORCH_TYPES = {wire_type: dtype for dtype, wire_type in WIRE_TYPES.items()}
"""The torch dtype of each wire type."""

_CASTS = {
    capture_pb2.ENCODING_FP32: torch.float32,
    capture_pb2.ENCODING_FP16: torch.float16,
    capture_pb2.ENCODING_BF16: torch.bfloat16,
}


def cast_of(form: RowFormat) -> torch.dtype | None:
    """Return the element dtype of a format whose rows are only elements (RAW and the casts); None for other formats."""
    return own_type(form) if form.encoding == capture_pb2.ENCODING_RAW else _CASTS.get(form.encoding)


def own_type(form: RowFormat) -> torch.dtype:
    """Return the dtype in which the model computed the rows."""
    return TORCH_TYPES[form.dtype]
