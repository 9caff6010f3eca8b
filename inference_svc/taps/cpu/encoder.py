"""The encodings on a CPU, implemented in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inference_svc.taps.element_types import cast_of
from inference_svc.taps.encodings.sae_encoder import SAEEncoder
from residuum.v1 import capture_pb2
from residuum.wire.rows.encodings import LARGEST, RANDOM_PROJECTIONS
from residuum.wire.rows.projection import projection_factor

if TYPE_CHECKING:
    from torch import Tensor

    from inference_svc.taps.encodings.bases import Basis
    from residuum.wire.rows.encodings import RowFormat

_GROUP_ELEMENTS = 1 << 20
"""How many elements are encoded at once, to limit the memory of intermediate tensors."""

_BITS = {2: torch.int16, 4: torch.int32}
"""The integer dtype for the bits of an element, by its size in bytes."""


def encode(rows: Tensor, form: RowFormat, basis: Basis | None, out: Tensor) -> None:
    """Encode rows as capture.proto says.

    Args:
        rows: [units, positions, width], with any strides.
        form: The format of the encoded rows.
        basis: For a random projection, the signs [width, dimensions]. For PROJECT, the vectors [dimensions, width].
            For SAE, the encoder. Otherwise None.
        out: Receives the encoded bytes, uint8 [units, form.payload_bytes(1, positions)].
    """
    cast = cast_of(form)
    if cast is not None:
        out.view(cast).view(rows.shape).copy_(rows)
        return
    if isinstance(basis, SAEEncoder):
        for unit, target in zip(rows, out, strict=True):
            basis.encode(unit, target.view(torch.int32).view(len(unit), 2, form.dimensions))
        return
    together = max(1, _GROUP_ELEMENTS // rows[0].numel())
    for first in range(0, len(rows), together):
        _encode_group(rows[first : first + together], form, basis, out[first : first + together])


def _encode_group(rows: Tensor, form: RowFormat, basis: Tensor | None, out: Tensor) -> None:
    encoded = out[:, form.prefix_bytes :].view(*rows.shape[:2], form.row_bytes)
    if form.encoding in LARGEST:
        _encode_largest(rows, form, encoded)
    elif form.prefix_bytes:
        scale, zero, q = _quantized(rows.float(), dim=1)
        _write(out, scale[:, 0], zero[:, 0])
        _write(encoded, q)
    elif form.encoding == capture_pb2.ENCODING_FULL8:
        _write(encoded, *_quantized(rows.float(), dim=2))
    else:
        assert basis is not None  # noqa: S101 - all others are projections
        projected = rows.float() @ (basis if form.encoding in RANDOM_PROJECTIONS else basis.T)
        if form.encoding in RANDOM_PROJECTIONS:
            projected *= float(projection_factor(form.dimensions))
        _write(encoded, *(_quantized(projected, 2) if form.encoding == capture_pb2.ENCODING_RP8 else (projected,)))


def _encode_largest(rows: Tensor, form: RowFormat, encoded: Tensor) -> None:
    """Write the elements of largest magnitude in the order of their indices. Of equal magnitudes, the first count."""
    bits = rows.contiguous().view(_BITS[rows.dtype.itemsize])
    magnitudes = bits & torch.iinfo(bits.dtype).max
    threshold = magnitudes.topk(form.dimensions, dim=2).values[..., -1:]
    above, equal = magnitudes > threshold, magnitudes == threshold
    room = form.dimensions - above.sum(dim=2, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=2) <= room))
    shape = (*rows.shape[:2], form.dimensions)
    index, values = kept.nonzero()[:, 2].view(shape), rows[kept].view(shape)
    if form.encoding == capture_pb2.ENCODING_TOPK:
        _write(encoded, index.to(torch.uint16), values)
        return
    scale, zero, q = _quantized(values.float(), dim=2)
    index = torch.where(scale.isnan(), torch.arange(form.dimensions), index)
    _write(encoded, scale, zero, index.to(torch.uint16), q)


def _quantized(values: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise float32 values along `dim`. Return scale and zero, of length 1 along `dim`, and q (uint8)."""
    zero = values.amin(dim, keepdim=True)
    scale = (values.amax(dim, keepdim=True) - zero) / 255
    is_finite = scale.isfinite()
    steps = ((values - zero) / scale).round_().clamp_(0, 255)
    q = torch.where(is_finite & (scale > 0), steps, 0).to(torch.uint8)
    return scale.where(is_finite, torch.nan), zero.where(is_finite, torch.nan), q


def _write(target: Tensor, *fields: Tensor) -> None:
    """Write fields, each [..., n], one after the other to the start of `target`, uint8 [..., bytes]."""
    offset = 0
    for field in fields:
        data = field.contiguous().view(torch.uint8)
        target[..., offset : offset + data.shape[-1]] = data
        offset += data.shape[-1]
