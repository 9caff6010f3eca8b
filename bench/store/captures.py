"""The captures of the measurements: rows of a model's shape, in the same blocks as a worker's, with random bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.v1 import capture_pb2, store_pb2, tensor_pb2
from residuum.wire.limits import BLOCK_TOKENS

_SITE = capture_pb2.SITE_RESID_POST
_DTYPE = tensor_pb2.DATA_TYPE_BFLOAT16
_ITEM_BYTES = 2
_SEED = 7


@dataclass(frozen=True)
class Shape:
    """The shape of every capture: all layers of a number of positions, in bfloat16."""

    layers: int = 36
    hidden: int = 2048
    positions: int = 639
    """The default is that of a request with 512 + 128 tokens, because the last token is never computed."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all rows of a capture."""
        return self.bytes_of(self.positions)

    @property
    def num_rows(self) -> int:
        """The number of rows of a capture."""
        return self.layers * self.positions

    def bytes_of(self, positions: int) -> int:
        """Return the bytes of all layers for a number of positions."""
        return self.layers * positions * self.hidden * _ITEM_BYTES

    def headers(self) -> Iterator[capture_pb2.ChunkHeader]:
        """Yield the header of each block of a capture: all layers of up to 32 positions."""
        for first in range(0, self.positions, BLOCK_TOKENS):
            yield capture_pb2.ChunkHeader(
                site=_SITE,
                layers=range(self.layers),
                positions=range(first, min(first + BLOCK_TOKENS, self.positions)),
                dtype=_DTYPE,
                width=self.hidden,
                encoding=capture_pb2.ENCODING_RAW,
            )

    def description(self, capture_id: str) -> capture_pb2.CaptureDescription:
        """Return the description with which a capture is opened."""
        spec = capture_pb2.CaptureSpec(
            sites=[_SITE], encoding=capture_pb2.ENCODING_RAW, overflow=capture_pb2.OVERFLOW_POLICY_WAIT
        )
        spec.layers.list.layers.extend(range(self.layers))
        description = capture_pb2.CaptureDescription(
            capture_id=capture_id,
            model="none",
            hidden_size=self.hidden,
            num_layers=self.layers,
            dtype=_DTYPE,
            spec=spec,
            prompt_token_ids=range(self.positions),
            num_sequences=1,
        )
        description.request_time.GetCurrentTime()
        return description

    def seal(self, capture_id: str) -> store_pb2.SealCaptureRequest:
        """Return the request that seals a capture: one token was generated, and the last token has no row."""
        outcome = capture_pb2.SequenceOutcome(generated_token_ids=[0], finish_reason="length")
        return store_pb2.SealCaptureRequest(
            capture_id=capture_id, sequences=[outcome], outcome=capture_pb2.CAPTURE_STATE_COMPLETE
        )


def random_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Return random bytes, which cannot be compressed, but are finite numbers in bfloat16. They are the same each time.

    Args:
        size: How many, an even number.
    """
    numbers = np.frombuffer(np.random.default_rng(_SEED).bytes(size), dtype=np.uint16)
    return (numbers & np.uint16(0xBFFF)).view(np.uint8)


def differs(values: npt.NDArray[Any], ring: npt.NDArray[np.uint8], offsets: Sequence[int]) -> bool:
    """Return whether the rows of a capture differ from those in the ring.

    Args:
        values: The rows, [layers, positions, hidden].
        ring: The content of the ring.
        offsets: The offset in the ring of each block of the capture, in the order of the positions.
    """
    layers, positions, hidden = values.shape
    for number, offset in enumerate(offsets):
        first = number * BLOCK_TOKENS
        count = min(BLOCK_TOKENS, positions - first)
        row_bytes = hidden * values.dtype.itemsize
        block = ring[offset : offset + layers * count * row_bytes].reshape(layers, count, row_bytes)
        here = np.ascontiguousarray(values[:, first : first + count]).view(np.uint8)
        if not np.array_equal(block, here):
            return True
    return False
