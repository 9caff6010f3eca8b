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

WORKING_ELEMENTS = 8 << 20
"""How many outputs are computed at once, so that a long prompt takes no more memory than this."""

WORKING_BYTES = 4 * 4 * WORKING_ELEMENTS
"""What encoding takes at most besides the encoders: the outputs, and what finding the largest of them takes."""

_FEATURES_AT_ONCE = 4096
"""How many features' 16-bit weights are converted to float32 at once."""

_PIECE_BYTES = 32 << 20
"""How much of a file is copied to the device at once."""


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
        """Return the encoder with these features as the kept ones; if there are none, the strongest. Copies nothing."""
        return replace(self, chosen=torch.tensor(features, device=self.weights.device) if features else None)

    def encode(self, rows: Tensor, out: Tensor) -> None:
        """Write the kept features of rows as capture.proto says.

        Args:
            rows: [n, width].
            out: int32 [n, 2, dimensions]: the numbers of the features, and the bits of their values.
        """
        together = max(1, WORKING_ELEMENTS // self.shape.features)
        for first in range(0, len(rows), together):
            part = out[first : first + together]
            numbers, values = self._kept(rows[first : first + together], part.shape[2])
            part[:, 0] = numbers
            part[:, 1] = values.view(torch.int32)

    def outputs(self, rows: Tensor) -> Tensor:
        """Return weights @ row + biases of each row, float32 [n, features]."""
        x = rows.float()
        if self.shape.normalization == LAYER_NORM:
            x = x - x.mean(dim=1, keepdim=True)
            x = x / (x.std(dim=1, keepdim=True) + LAYER_NORM_EPSILON)
        elif rows.is_cuda and rows.dtype == self.weights.dtype != torch.float32:
            # Tensor cores: products of 16-bit numbers are exact in float32, and so are the sums but for their order.
            return torch.mm(rows, self.weights.T, out_dtype=torch.float32).add_(self.biases)
        if self.weights.dtype == torch.float32:
            return torch.addmm(self.biases, x, self.weights.T)
        outputs = x.new_empty(len(x), self.shape.features)
        for first in range(0, self.shape.features, _FEATURES_AT_ONCE):
            part = slice(first, first + _FEATURES_AT_ONCE)
            outputs[:, part] = torch.addmm(self.biases[part], x, self.weights[part].float().T)
        return outputs

    def _kept(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        outputs = self.outputs(rows)
        if self.shape.activation == JUMP_RELU:
            outputs.masked_fill_(outputs <= self.threshold, 0.0)
        if self.chosen is not None:
            if self.shape.activation == TOP_K:
                top = outputs.topk(self.shape.active, dim=1)
                outputs = outputs.fill_(0.0).scatter_(1, top.indices, top.values)
            return self.chosen.to(torch.int32), outputs[:, self.chosen].relu_()
        active = min(count, self.shape.active) if self.shape.activation == TOP_K else count
        values, numbers = outputs.topk(active, dim=1)
        values.relu_()
        numbers = torch.where(values == 0, self.shape.features, numbers).to(torch.int32)
        missing = (0, count - active)
        return (
            torch.nn.functional.pad(numbers, missing, value=self.shape.features),
            torch.nn.functional.pad(values, missing),
        )


def load_encoder(path: Path, shape: EncoderShape, device: torch.device) -> SAEEncoder:
    """Copy an encoder's bytes from a file to a device, in pieces.

    Raises:
        OSError: The file cannot be read.
        RuntimeError: The device has no memory left.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r", shape=(shape.nbytes,))
    memory = torch.empty(shape.nbytes, dtype=torch.uint8, device=device)
    for first in range(0, shape.nbytes, _PIECE_BYTES):
        piece = np.array(data[first : first + _PIECE_BYTES])
        memory[first : first + len(piece)].copy_(torch.from_numpy(piece))
    return encoder_of(memory, shape)


def encoder_of(memory: Tensor, shape: EncoderShape) -> SAEEncoder:
    """Return the encoder whose bytes are in a device's memory, uint8 [shape.nbytes]. Copies nothing."""
    end, size = shape.weight_bytes, NUMBER_BYTES * shape.features
    weights = memory[:end].view(TORCH_TYPES[shape.dtype]).view(shape.features, shape.width)
    biases = _floats(memory[end : end + size])
    return SAEEncoder(shape, weights, biases, _floats(memory[end + size :]) if shape.activation == JUMP_RELU else None)


def _floats(memory: Tensor) -> Tensor:
    aligned = memory if memory.storage_offset() % NUMBER_BYTES == 0 else memory.clone()
    return aligned.view(torch.float32)
