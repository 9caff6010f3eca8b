"""A row format of each kind, and rows for it."""

from __future__ import annotations

import numpy as np

from residuum.v1 import capture_pb2, sae_pb2, tensor_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.rows.encodings import (
    BF16,
    BY_DIMENSION,
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
    RowFormat,
    basis_of,
)
from residuum.wire.sae import RELU, Encoder, EncoderShape

F32, F16, B16 = tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_FLOAT16, tensor_pb2.DATA_TYPE_BFLOAT16
WIDTH = 24

FORMATS = {
    "raw": RowFormat(RAW, WIDTH, B16),
    "fp32": RowFormat(FP32, WIDTH, B16),
    "fp16": RowFormat(FP16, WIDTH, B16),
    "bf16": RowFormat(BF16, WIDTH, F32),
    "full8": RowFormat(FULL8, WIDTH, B16),
    "full8 along dimensions": RowFormat(FULL8, WIDTH, B16, axis=BY_DIMENSION),
    "rp8": RowFormat(RP8, WIDTH, B16, dimensions=10),
    "rp": RowFormat(RP, WIDTH, F32, dimensions=10),
    "topk8": RowFormat(TOPK8, WIDTH, B16, dimensions=5),
    "topk": RowFormat(TOPK, WIDTH, B16, dimensions=5),
    "project": RowFormat(PROJECT, WIDTH, F16, dimensions=30),
    "sae": RowFormat(SAE, WIDTH, B16, dimensions=6, features=40),
}


def rows(dtype=F32, shape=(2, 3, WIDTH), seed=0, scale=3.0):
    """Return rows [layers, positions, width] of the element type."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(numpy_dtype(dtype))


def basis(form: RowFormat, seed: int = 11) -> np.ndarray | Encoder | None:
    """Return the matrix that rows of the format are multiplied with, or the encoder; None if there is none."""
    if form.encoding == SAE:
        return encoder(form.features, form.width)
    vectors = list(rows(shape=(form.dimensions, form.width), seed=99)) if form.encoding == PROJECT else []
    return basis_of(form, capture_pb2.EncodingOptions(seed=seed), vectors)


def encoder(features: int, width: int, *, seed: int = 98, activation=RELU, active=0, chosen=(), norm=0, dtype=F32):
    """Return an encoder of a sparse autoencoder."""
    rng = np.random.default_rng(seed)
    header = sae_pb2.SAEHeader(
        features=features, width=width, dtype=dtype, activation=activation, active=active, normalization=norm
    )
    shape = EncoderShape.of(header)
    weights = rng.standard_normal((features, width)).astype(numpy_dtype(dtype))
    biases, threshold = (rng.standard_normal(features).astype(np.float32) for _ in range(2))
    return Encoder(
        shape, weights, biases, threshold if activation == sae_pb2.SAE_ACTIVATION_JUMP_RELU else None, chosen
    )


def header_of(form: RowFormat, layers, positions, **fields: object) -> capture_pb2.ChunkHeader:
    """Return the header of a chunk of such rows."""
    return capture_pb2.ChunkHeader(
        site=capture_pb2.SITE_RESID_POST,
        layers=layers,
        positions=positions,
        dtype=form.dtype,
        width=form.width,
        encoding=form.encoding,
        dimensions=form.dimensions,
        axis=form.axis,
        features=form.features,
        **fields,
    )
