"""The captures that are measured with: rows of a model's shape, cut as a worker cuts them, and their bytes."""

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
    """What every capture of a measurement holds: all layers of so many positions, in bfloat16."""

    layers: int = 36
    hidden: int = 2048
    positions: int = 639
    """By default those of a request of 512 + 128 tokens, the last of which is never computed."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of one capture."""
        return self.bytes_of(self.positions)

    @property
    def num_rows(self) -> int:
        """Rows of one capture."""
        return self.layers * self.positions

    def bytes_of(self, positions: int) -> int:
        """Return the bytes of all layers of so many positions."""
        return self.layers * positions * self.hidden * _ITEM_BYTES

    def headers(self) -> Iterator[capture_pb2.ChunkHeader]:
        """Yield what each block of a capture holds: all layers of up to 32 positions."""
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
        """Return what a capture is opened with."""
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
        """Return what a capture is sealed with: one token was generated, and the last token has no row."""
        outcome = capture_pb2.SequenceOutcome(generated_token_ids=[0], finish_reason="length")
        return store_pb2.SealCaptureRequest(
            capture_id=capture_id, sequences=[outcome], outcome=capture_pb2.CAPTURE_STATE_COMPLETE
        )


def random_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Return bytes that nothing could compress or mistake for others; the same each time."""
    return np.frombuffer(np.random.default_rng(_SEED).bytes(size), dtype=np.uint8)


def differs(values: npt.NDArray[Any], ring: npt.NDArray[np.uint8], offsets: Sequence[int]) -> bool:
    """Tell whether the rows of a capture are not those that lay in the ring.

    Args:
        values: The rows, [layers, positions, hidden].
        ring: What the ring held.
        offsets: Where in it each block of the capture began, in the order of the positions.
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
