"""Runs part `blocks` of bench.encodings on the CPU, in Triton's interpreter, without a real clock.

It is a separate program, because Triton decides on import whether it interprets kernels. It prints the result as JSON.
"""

from __future__ import annotations

import tests.triton_interpreter  # noqa: F401

# isort: split

import json
import sys

import numpy as np
import torch

from bench.encodings import blocks
from tests.inference.taps.gpu.copies_without_gpu import without_gpu

memory = np.zeros(1 << 21, dtype=np.uint8)


class Interpreter:
    """The CPU. Its measurements count calls instead of time."""

    name = "interpreter"

    def rows(self, block: blocks.Block) -> torch.Tensor:
        return torch.randn(*block[1:], dtype=torch.bfloat16)

    def host_memory(self, size: int) -> torch.Tensor:
        assert size <= len(memory)
        return torch.from_numpy(memory)

    def seconds(self, work, prepare=lambda: None) -> float:
        prepare()
        work()
        return 1.0


if __name__ == "__main__":
    with without_gpu():
        sys.stdout.write(json.dumps(blocks.measure(2, 48, Interpreter(), (3, 20))))
