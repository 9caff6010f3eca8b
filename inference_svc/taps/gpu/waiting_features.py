"""Copies to the ring whose features are encoded together, when their group starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from inference_svc.taps.ring_writer import NO_MEMORY, Encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from inference_svc.taps.blocks import Block
    from inference_svc.taps.encodings.bases import Basis
    from inference_svc.taps.gpu.encoder import FeatureRows, GpuEncoder


class Copy(NamedTuple):
    """A copy to the ring."""

    encoded: Encoded
    block: Block | None
    """The block to give back when the copy is done."""
    source: tuple[Tensor, Basis | None]
    """The tensors that are encoded. Held here because they must live until the copy is done."""


class WaitingFeatures:
    """Copies of blocks whose features are kept. Several small ones are encoded with one call."""

    def __init__(self, encoder: GpuEncoder, lose: Callable[[Copy, BaseException], object]) -> None:
        """Begin without any.

        Args:
            encoder: Encodes them.
            lose: Called with a copy that the device has no memory for, and with the error. Parts of it may be on their
                way to its extent.
        """
        self._encoder = encoder
        self._lose = lose
        self._waiting: list[tuple[Copy, FeatureRows]] = []

    def add(self, copy: Copy, rows: FeatureRows) -> None:
        """Let a copy wait for `encode`."""
        self._waiting.append((copy, rows))

    def encode(self) -> None:
        """Encode what waits."""
        waiting, self._waiting = self._waiting, []
        copies = iter([copy for copy, _ in waiting])
        for group in self._encoder.divide([rows for _, rows in waiting]):
            together = [next(copies) for _ in group]
            try:
                self._encoder.encode_features(group)
            except NO_MEMORY:  # each alone needs less
                for copy, rows in zip(together, group, strict=True):
                    self._encode_alone(copy, rows)

    def _encode_alone(self, copy: Copy, rows: FeatureRows) -> None:
        try:
            self._encoder.encode_features([rows])
        except NO_MEMORY as error:
            self._lose(copy, error)
