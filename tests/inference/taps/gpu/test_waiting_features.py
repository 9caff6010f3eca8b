"""Which copies are encoded together, and which are lost, if the device has too little memory."""

from __future__ import annotations

import torch

from inference_svc.taps.gpu.waiting_features import WaitingFeatures


class Encoder:
    """An encoder whose device has memory for one block at a time, except for the block "huge"."""

    def __init__(self):
        self.calls = []

    def divide(self, blocks):
        for first in range(0, len(blocks), 2):
            yield blocks[first : first + 2]

    def encode_features(self, blocks):
        self.calls.append(list(blocks))
        if len(blocks) > 1 or "huge" in blocks:
            raise torch.cuda.OutOfMemoryError


def test_each_block_of_a_group_without_memory_is_tried_alone_and_only_those_without_memory_are_lost():
    encoder, lost = Encoder(), []
    features = WaitingFeatures(encoder, lambda copy, error: lost.append((copy, type(error))))
    for name in ("a", "huge", "b"):
        features.add(f"copy of {name}", name)
    features.encode()
    assert encoder.calls == [["a", "huge"], ["a"], ["huge"], ["b"]]
    assert lost == [("copy of huge", torch.cuda.OutOfMemoryError)]
    features.encode()
    assert len(encoder.calls) == 4, "what was encoded does not wait any more"
