"""Part `blocks`, on a GPU: the time that the sink's stream takes to encode a block and write it to the host.

It measures the worker's encoder, from rows in device memory to bytes in pinned host memory, like the ring. It compares
with two lower limits: the time to copy the encoded bytes at the rate of raw rows, and the time to read the rows within
device memory.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bench.encodings.forms import CASES, SEED
from residuum.v1 import tensor_pb2
from residuum.wire.rows.encodings import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from bench.encodings.forms import Case
    from residuum.wire.rows.encodings import RowFormat

_WARMUPS, _REPEATS = 3, 15
_GENERATED, _PROMPT = 32, 512


class Block(NamedTuple):
    """The shape of a capture block."""

    name: str
    layers: int
    positions: int
    width: int


class Device(Protocol):
    """A device that encodes blocks."""

    name: str

    def rows(self, block: Block) -> Tensor:
        """Return a block of rows, bfloat16 [layers, positions, width]."""

    def host_memory(self, size: int) -> Tensor:
        """Return host memory that the device can write, uint8 [size]."""

    def seconds(self, work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        """Return the seconds that the device takes for the launched work, the median of several runs.

        `prepare` is called before each run, outside the measured time.
        """


class Gpu:
    """The GPU."""

    def __init__(self) -> None:
        import torch

        self.name = torch.cuda.get_device_name()

    def rows(self, block: Block) -> Tensor:
        """See `Device`."""
        import torch

        return torch.randn(*block[1:], dtype=torch.bfloat16, device="cuda")

    def host_memory(self, size: int) -> Tensor:
        """See `Device`."""
        import torch

        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def seconds(self, work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        """See `Device`."""
        import torch

        times: list[float] = []
        for number in range(_WARMUPS + _REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            prepare()
            torch.cuda.synchronize()
            torch.cuda._sleep(1 << 20)  # noqa: SLF001 - so that all launches are queued when the clock starts
            start.record()
            work()
            end.record()
            end.synchronize()
            if number >= _WARMUPS:
                times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)


def measure(
    layers: int, width: int, device: Device, positions: tuple[int, int] = (_GENERATED, _PROMPT)
) -> dict[str, Any]:
    """Measure all encodings on blocks of a model's shape.

    Args:
        layers: Decoder layers.
        width: Elements in a row.
        device: The device.
        positions: The positions in a block of generated tokens, and in a block of a prompt.
    """
    generated, prompt = positions
    blocks = (Block("generated", layers, generated, width), Block("prompt", layers, prompt, width))
    return {
        "device": device.name,
        "layers": layers,
        "width": width,
        "blocks": [_measure_block(device, block) for block in blocks],
    }


def lines(part: dict[str, Any]) -> list[str]:
    """Return the printed lines."""
    found = []
    for block in part["blocks"]:
        floor = f"reading the rows takes {block['read_seconds'] * 1e6:.1f} us"
        found.append(f"{block['name']}: {part['layers']} layers x {block['positions']} positions; {floor}")
        found += [
            f"{case['name']:>18}  {case['bytes'] / 1e6:8.3f} MB  {case['seconds'] * 1e6:8.1f} us"
            f"  its bytes alone {case['floor_seconds'] * 1e6:8.1f} us"
            for case in block["cases"]
        ]
    return found


def _measure_block(device: Device, block: Block) -> dict[str, Any]:
    import torch

    from inference_svc.taps.gpu.encoder import GpuEncoder
    from inference_svc.taps.gpu.host_copies import HostCopies

    rows = device.rows(block)
    copy = torch.empty_like(rows)
    memory = device.host_memory(2 * rows.nbytes + (1 << 20))
    copies = HostCopies()
    encoder = GpuEncoder(rows.device, copies)

    def measured(case: Case) -> dict[str, Any]:
        form = case.form(block.width, tensor_pb2.DATA_TYPE_BFLOAT16)
        basis = _basis(case, form, rows.device)
        seconds = device.seconds(lambda: encoder.encode(rows, form, basis, memory.data_ptr()), copies.wait)
        return {"name": case.name, "bytes": form.payload_bytes(block.layers, block.positions), "seconds": seconds}

    cases = [measured(case) for case in CASES]
    rate = cases[0]["bytes"] / cases[0]["seconds"]  # raw rows are only copied
    return {
        "name": block.name,
        "positions": block.positions,
        "read_seconds": device.seconds(lambda: copy.copy_(rows)) / 2,  # a copy writes as much as it reads
        "cases": [{**case, "floor_seconds": case["bytes"] / rate} for case in cases],
    }


def _basis(case: Case, form: RowFormat, device: torch.device) -> Tensor | None:
    import torch

    from inference_svc.taps.encodings.signs import SignCache

    if case.projects:
        return SignCache(form.width, device).get(SEED, form.dimensions, torch.bfloat16)
    return torch.randn(form.dimensions, form.width, device=device) if form.encoding == PROJECT else None
