"""Encoders of sparse autoencoders on a device, in torch. sae.proto defines the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.taps.element_types import TORCH_TYPES
from residuum.wire.sae import JUMP_RELU, LAYER_NORM, LAYER_NORM_EPSILON, NUMBER_BYTES, TOP_K, EncoderShape

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

GROUP_ELEMENTS = 4 << 20
"""How many elements of rows, and how many outputs, are handled at once, so that a long prompt takes no more memory. If
a GPU keeps the strongest features, the sink's buffer limits the outputs."""

WORKING_BYTES = 128 << 20
"""What encoding takes at most at a time, besides the encoders. Of `GROUP_ELEMENTS` float32 numbers each, 16 MiB: the
outputs (on a GPU they are in the sink's buffer), the rows (of several blocks as one matrix, and in float32), converted
weights, and up to three for the largest outputs with their numbers. The rest is for what torch needs in between and
rounds up to."""

_CONVERTED_BYTES = 16 << 20
"""How much float32 memory 16-bit weights are converted to at once."""

_PIECE_BYTES = 32 << 20
"""How much of a file is copied to the device at once."""

_KERNEL_FEATURES = 1 << 19
"""How many features one call of the kernel for inner products computes; CUDA limits the size of a grid."""


@dataclass(frozen=True, eq=False)
class SAEEncoder:
    """An encoder in the device's memory, and which of its features are kept."""

    shape: EncoderShape
    weights: Tensor
    """[features, width], of the shape's dtype."""
    biases: Tensor
    """float32 [features]."""
    threshold: Tensor | None = None
    """float32 [features]; None without JUMP_RELU."""
    chosen: Tensor | None = None
    """The features that are kept, int64 [dimensions]; None: the strongest."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights, biases and thresholds."""
        return self.shape.nbytes

    def choosing(self, features: tuple[int, ...]) -> SAEEncoder:
        """Return the encoder with these features as the kept ones; if there are none, the strongest.

        It copies no weights, and does not wait for the device.
        """
        if not features:
            return replace(self, chosen=None)
        chosen = torch.tensor(features)
        if self.weights.is_cuda:  # a copy from memory that is not pinned waits for all that the stream has to do
            chosen = chosen.pin_memory().to(self.weights.device, non_blocking=True)
        return replace(self, chosen=chosen)

    def encode(self, rows: Tensor, out: Tensor, space: Tensor | None = None) -> None:
        """Write the kept features of rows as capture.proto says.

        Args:
            rows: [n, width].
            out: int32 [n, 2, dimensions]: the numbers of the features, and the bits of their values.
            space: Memory for outputs, float32. None, or shorter than one row's: they are allocated.
        """
        computed = self._computed()
        num_outputs = len(computed.biases)
        together = max(1, GROUP_ELEMENTS // max(num_outputs, self.shape.width))
        if space is None or len(space) < num_outputs:
            space = computed.biases.new_empty(num_outputs * min(together, len(rows)))
        together = min(together, len(space) // num_outputs)
        for first in range(0, len(rows), together):
            part = out[first : first + together]
            outputs = space[: len(part) * num_outputs].view(len(part), num_outputs)
            computed.write_outputs(rows[first : first + together], outputs)
            computed.keep(outputs, part[:, 0], part[:, 1].view(torch.float32))

    def _computed(self) -> SAEEncoder:
        """Return an encoder whose features are computed: all, or if no feature depends on others, only the chosen."""
        if self.chosen is None or self.shape.activation == TOP_K:
            return self
        threshold = None if self.threshold is None else self.threshold[self.chosen]
        return replace(self, weights=self.weights[self.chosen], biases=self.biases[self.chosen], threshold=threshold)

    def keep(self, outputs: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Write the numbers (int32) and the values (float32) of the kept features, [n, count]. Overwrites outputs.

        On a GPU, this is for chosen features only, and each operation is a kernel. So what the last copies can do, such
        as a conversion, is no operation of its own.
        """
        if self.threshold is not None:
            outputs.masked_fill_(outputs <= self.threshold, 0.0)
        count = numbers.shape[1]
        if self.chosen is not None:
            if self.shape.activation == TOP_K:
                top = outputs.topk(self.shape.active, dim=1, sorted=False)
                outputs = outputs.fill_(0.0).scatter_(1, top.indices, top.values)[:, self.chosen]
            numbers[:] = self.chosen
            values[:] = outputs.relu_()
            return
        active = self.most_active(count)
        top = outputs.topk(active, dim=1)
        strongest = top.values.relu_()
        numbers[:, :active] = top.indices.masked_fill_(strongest == 0, self.shape.features)
        values[:, :active] = strongest
        if active < count:
            numbers[:, active:] = self.shape.features
            values[:, active:] = 0.0

    def most_active(self, count: int) -> int:
        """Return how many of `count` kept features may be above 0."""
        return min(count, self.shape.active) if self.shape.activation == TOP_K else count

    def outputs(self, rows: Tensor) -> Tensor:
        """Return weights @ row + biases of each row, float32 [n, features]."""
        outputs = rows.new_empty(len(rows), len(self.biases), dtype=torch.float32)
        self.write_outputs(rows, outputs)
        return outputs

    def write_outputs(self, rows: Tensor, outputs: Tensor) -> None:
        """Write weights @ row + biases of each row, summed in float32, to `outputs`, float32 [n, features]."""
        self.write_products(rows, outputs)
        outputs.add_(self.biases)

    def write_products(self, rows: Tensor, outputs: Tensor) -> None:
        """Write weights @ row of each row, summed in float32, to `outputs`, float32 [n, features]."""
        if self.shape.normalization == LAYER_NORM:
            rows = rows.to(torch.float32, copy=True)
            rows.sub_(rows.mean(dim=1, keepdim=True))
            rows.div_(rows.std(dim=1, keepdim=True).add_(LAYER_NORM_EPSILON))
        if rows.is_cuda and rows.dtype == self.weights.dtype != torch.float32:
            # Tensor cores: products of 16-bit numbers are exact in float32, and so are the sums but for their order.
            torch.mm(rows, self.weights.T, out_dtype=torch.float32, out=outputs)
        elif rounds_factors(rows):
            self._write_by_kernel(rows, outputs)
        elif self.weights.dtype == torch.float32:
            torch.mm(rows.float(), self.weights.T, out=outputs)
        else:
            numbers = rows.float()
            together = max(1, _CONVERTED_BYTES // (NUMBER_BYTES * self.shape.width))
            for first in range(0, len(self.biases), together):
                part = slice(first, first + together)
                torch.mm(numbers, self.weights[part].float().T, out=outputs[:, part])

    def _write_by_kernel(self, rows: Tensor, outputs: Tensor) -> None:
        from inference_svc.taps.gpu.kernels import encodings  # only GPU installations have Triton

        for first in range(0, len(self.biases), _KERNEL_FEATURES):
            part = slice(first, first + _KERNEL_FEATURES)
            encodings.inner_products(rows[None], self.weights[part], outputs[:, part], outputs.stride(0))


def rounds_factors(rows: Tensor) -> bool:
    """Return whether torch may round float32 factors to TF32 on this device (VLLM_FLOAT32_MATMUL_PRECISION).

    That is a setting of the process for the model. To change it for a moment would change the model's own arithmetic.
    """
    if not rows.is_cuda:
        return False
    try:
        return str(torch.get_float32_matmul_precision()) != "highest"
    except RuntimeError:  # it was set in torch's old and new way, which do not agree
        return True


def load_encoder(path: Path, shape: EncoderShape, digest: bytes, memory: Tensor) -> SAEEncoder:
    """Copy an encoder's bytes from a file to a device's memory, in pieces.

    Args:
        path: The file, as sae.proto orders it.
        shape: The encoder's shape.
        digest: The encoder's digest.
        memory: uint8 [shape.nbytes].

    Raises:
        OSError: The file cannot be read, is too short, or holds other bytes. After the end of an upload, its path may
            be that of another one.
    """
    sha = shape.begin_digest()
    buffer = np.empty(min(_PIECE_BYTES, shape.nbytes), dtype=np.uint8)
    numbers = shape.nbytes - shape.weight_bytes
    with path.open("rb", buffering=0) as file:
        for start, size, target in ((0, shape.weight_bytes, numbers), (shape.weight_bytes, numbers, 0)):
            for first in range(0, size, len(buffer)):
                piece = buffer[: min(len(buffer), size - first)]
                file.seek(start + first)
                if file.readinto(piece.data) != len(piece):
                    raise OSError(f"{path} ends before byte {start + first + len(piece)}")
                sha.update(piece.data)
                memory[target + first : target + first + len(piece)].copy_(torch.from_numpy(piece))
    if sha.digest() != digest:
        raise OSError(f"{path} does not hold the encoder {digest.hex()}")
    return _encoder_in(memory, shape)


def encoder_of(data: Tensor, shape: EncoderShape) -> SAEEncoder:
    """Return a copy of the encoder whose bytes are `data`, uint8 [shape.nbytes], as sae.proto orders them."""
    return _encoder_in(torch.cat([data[shape.weight_bytes :], data[: shape.weight_bytes]]), shape)


def _encoder_in(memory: Tensor, shape: EncoderShape) -> SAEEncoder:
    """Return the encoder in a device's memory: biases and thresholds first, because they must be aligned."""
    size = NUMBER_BYTES * shape.features
    numbers = [
        memory[first : first + size].view(torch.float32) for first in range(0, shape.nbytes - shape.weight_bytes, size)
    ]
    weights = memory[-shape.weight_bytes :].view(TORCH_TYPES[shape.dtype]).view(shape.features, shape.width)
    return SAEEncoder(shape, weights, numbers[0], numbers[1] if shape.activation == JUMP_RELU else None)
