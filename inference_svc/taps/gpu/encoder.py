"""The encoder on a GPU: it encodes rows into a buffer of fixed size, and copies the buffer to the ring.

All work goes to the current stream. Only the features of sparse autoencoders take more device memory, up to
`sae_encoder.WORKING_BYTES`. Large blocks pass through the buffer in parts. On the stream, each part starts when the
part before it has left the buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from inference_svc.taps.element_types import cast_of
from inference_svc.taps.encodings.sae_encoder import GROUP_ELEMENTS, SAEEncoder, rounds_factors
from inference_svc.taps.gpu.kernels import encodings, features
from residuum.v1 import capture_pb2
from residuum.wire.rows.encodings import LARGEST, RANDOM_PROJECTIONS
from residuum.wire.rows.projection import projection_factor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from inference_svc.taps.encodings.bases import Basis
    from inference_svc.taps.gpu.host_copies import HostCopies
    from residuum.wire.rows.encodings import RowFormat

STAGED_BYTES = 16 << 20
"""The size of the buffer for encoded rows, and of the buffer for sums: those of random projections."""

OUTPUT_BYTES = 64 << 20
"""The size of the buffer for sums if captures may keep features. The outputs of 503 rows fit, if 32 of 32,768 features
are kept. Fewer rows would mostly wait for the weights, which each computation reads whole."""


class Part(NamedTuple):
    """A part of a block that fits the buffers."""

    rows: Tensor
    """[units, positions, width]"""
    offset: int
    """The offset of its encoded bytes in those of the block."""
    nbytes: int
    """The number of its encoded bytes."""


class FeatureRows(NamedTuple):
    """A block whose strongest features are kept."""

    rows: Tensor
    """[units, positions, width]"""
    form: RowFormat
    """The format of the encoded rows."""
    encoder: SAEEncoder
    address: int
    """See `GpuEncoder.encode`."""

    def fits_with(self, other: FeatureRows) -> bool:
        """Return whether one call can encode both. The dtype of rows is part of their form."""
        one, two = self.encoder, other.encoder
        keep_strongest = one.chosen is None and two.chosen is None
        return keep_strongest and one.weights is two.weights and self.form == other.form


class GpuEncoder:
    """Encodes blocks and writes them to host memory."""

    def __init__(
        self, device: torch.device, copies: HostCopies, staged_bytes: int = STAGED_BYTES, sum_bytes: int = STAGED_BYTES
    ) -> None:
        """Allocate the buffers: for encoded rows, and for sums. `copies` bring what is encoded to the host.

        The buffer for sums must hold the outputs and the candidates of one row; see `sums_of`.
        """
        self._copies = copies
        self._staged = torch.empty(staged_bytes, dtype=torch.uint8, device=device)
        self._sums = torch.empty(sum_bytes // 4, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return int(self._staged.nbytes + self._sums.nbytes)

    def encode(self, rows: Tensor, form: RowFormat, basis: Basis | None, address: int) -> None:
        """Encode rows as capture.proto says, and write them to host memory.

        Args:
            rows: [units, positions, width], contiguous except for gaps between units.
            form: The format of the encoded rows.
            basis: For a random projection, the signs [width, dimensions]. For PROJECT, the vectors [dimensions, width].
                For SAE, the encoder. Otherwise None.
            address: Pinned host memory for form.payload_bytes(units, positions) bytes.
        """
        if rows.dtype == cast_of(form):
            self._copies.copy(rows, address)
            return
        for part in self._parts(rows, form):
            staged = self._staged[: part.nbytes]
            self._encode_part(part.rows, form, basis, staged)
            self._copies.copy(staged[None], address + part.offset)

    def encode_features(self, blocks: Sequence[FeatureRows]) -> None:
        """Encode blocks that fit with each other. Several small ones are encoded together.

        The weights of a sparse autoencoder are then read once for all of them, and the host launches a few kernels
        instead of a few for each.
        """
        if len(blocks) == 1:
            rows, form, encoder, address = blocks[0]
            self.encode(rows, form, encoder, address)
            return
        form, encoder = blocks[0].form, blocks[0].encoder
        rows = torch.cat([block.rows.reshape(-1, form.width) for block in blocks])
        staged = self._staged[: len(rows) * form.row_bytes]
        self._keep_features(encoder, rows, staged.view(torch.int32).view(len(rows), 2, form.dimensions))
        first = 0
        for block in blocks:
            end = first + form.payload_bytes(*block.rows.shape[:2])
            self._copies.copy(staged[None, first:end], block.address)
            first = end

    def divide(self, blocks: Sequence[FeatureRows]) -> Iterator[Sequence[FeatureRows]]:
        """Divide blocks, in their order, into groups for `encode_features`. What a group has fits the buffers."""
        group: list[FeatureRows] = []
        left = 0
        for block in blocks:
            rows = block.rows.shape[0] * block.rows.shape[1]
            if group and not (rows <= left and block.fits_with(group[0])):
                yield group
                group = []
            if not group:
                left = min(
                    len(self._staged) // block.form.row_bytes,
                    len(self._sums) // sums_of(block.encoder, block.form.dimensions),
                    GROUP_ELEMENTS // block.form.width,  # the rows are copied, so that they are one matrix
                )
            group.append(block)
            left -= rows
        if group:
            yield group

    def _parts(self, rows: Tensor, form: RowFormat) -> Iterator[Part]:
        """Divide rows into groups of units. If a unit does not fit the buffers, divide it into runs of positions."""
        units, positions, width = rows.shape
        unit_bytes = form.payload_bytes(1, positions)
        # Random projections also multiply the empty places of a block; see `_multiply`.
        with_empty = units > 1 and form.encoding in RANDOM_PROJECTIONS
        capacity = rows.stride(0) // width if with_empty else positions
        max_rows = min(len(self._staged) // form.row_bytes, len(self._sums) // max(form.dimensions, 1))
        together = min(len(self._staged) // unit_bytes, max_rows // capacity)
        if together:
            for first in range(0, units, together):
                part = rows[first : first + together]
                yield Part(part, first * unit_bytes, len(part) * unit_bytes)
            return
        for unit in range(units):
            for first in range(0, positions, max_rows):
                part = rows[unit : unit + 1, first : first + max_rows]
                offset = unit * unit_bytes + form.prefix_bytes + first * form.row_bytes
                yield Part(part, offset, part.shape[1] * form.row_bytes)

    def _encode_part(self, rows: Tensor, form: RowFormat, basis: Basis | None, out: Tensor) -> None:
        encoding, cast = form.encoding, cast_of(form)
        if cast is not None:
            out.view(cast).view(rows.shape).copy_(rows)
            return
        if isinstance(basis, SAEEncoder):
            for unit, target in zip(rows, out.view(len(rows), -1), strict=True):
                self._keep_features(basis, unit, target.view(torch.int32).view(len(unit), 2, form.dimensions))
            return
        if encoding in LARGEST:
            encodings.keep_largest(rows, out, form.dimensions, quantize=encoding == capture_pb2.ENCODING_TOPK8)
        elif form.prefix_bytes:
            encodings.quantize_columns(rows, out)
        elif encoding == capture_pb2.ENCODING_FULL8:
            encodings.quantize_rows(rows, out)
        elif encoding in RANDOM_PROJECTIONS:
            assert basis is not None  # noqa: S101 - the caller has one for each random projection
            sums, factor = self._multiply(rows, basis), float(projection_factor(form.dimensions))
            if encoding == capture_pb2.ENCODING_RP8:
                encodings.quantize_rows(sums, out, factor)
            else:
                torch.mul(sums, factor, out=out.view(torch.float32).view(sums.shape))
        else:
            assert basis is not None  # noqa: S101 - the caller has the vectors of PROJECT
            encodings.inner_products(rows, basis, out.view(torch.float32))

    def _keep_features(self, encoder: SAEEncoder, rows: Tensor, out: Tensor) -> None:
        """Write the kept features of rows [n, width] to `out`, int32 [n, 2, count]; see `SAEEncoder.encode`."""
        if encoder.chosen is not None:
            encoder.encode(rows, out, self._sums)
            return
        num_features, sums = len(encoder.biases), self._sums
        # Rows may be converted to float32, outside the buffers.
        together = min(len(sums) // sums_of(encoder, out.shape[2]), max(1, GROUP_ELEMENTS // encoder.shape.width))
        for first in range(0, len(rows), together):
            part = out[first : first + together]
            border = len(part) * num_features
            outputs = sums[:border].view(len(part), num_features)
            encoder.write_products(rows[first : first + together], outputs)
            features.keep_strongest(
                outputs, encoder.biases, encoder.threshold, sums[border:].view(torch.int32), part,
                encoder.most_active(out.shape[2]),
            )  # fmt: skip

    def _multiply(self, rows: Tensor, signs: Tensor) -> Tensor:
        """Return rows @ signs, float32 [units, positions, dimensions], in the buffer for sums.

        Products with signs are exact, and sums are float32. Tensor cores compute them for 16-bit rows.
        """
        units, positions, width = rows.shape
        if rows.dtype == torch.float32 and rounds_factors(rows):
            sums = self._sums[: units * positions * signs.shape[1]].view(units, positions, -1)
            encodings.inner_products(rows, signs.T, sums)
            return sums
        capacity = rows.stride(0) // width if units > 1 else positions
        # Empty places of the block are multiplied too, so that all units form one matrix.
        matrix = rows.as_strided((units * capacity, width), (width, 1))
        sums = self._sums[: len(matrix) * signs.shape[1]].view(len(matrix), -1)
        if rows.is_cuda and rows.dtype != torch.float32:
            torch.mm(matrix, signs, out_dtype=torch.float32, out=sums)
        else:
            torch.mm(matrix.float(), signs.float(), out=sums)
        return sums.view(units, capacity, -1)[:, :positions]


def sums_of(encoder: SAEEncoder, count: int) -> int:
    """Return how many numbers of the buffer for sums a row takes: its outputs, and the candidates for its features."""
    return len(encoder.biases) + features.candidate_numbers(len(encoder.biases), encoder.most_active(count))
