"""Makes the ring ready for copies from the device, and checks them at startup: rows must arrive unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from inference_svc.taps.errors import UnsupportedEngineError
from inference_svc.taps.gpu.driver import CopyFailedError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from inference_svc.shipping.worker.producer import RingProducer
    from inference_svc.taps.gpu.host_copies import HostCopies

_CHECKED_UNITS = (1, 3, 16)
"""Units of the copied blocks. Each block holds as many positions as units, and has one free place."""


class CannotCopyError(UnsupportedEngineError):
    """Rows do not get from the device to the ring."""


def pin(producer: RingProducer) -> int:
    """Pin the ring's memory, and return the address at which the device reaches it.

    Raises:
        CannotCopyError: CUDA refuses.
    """
    memory = producer.memory
    # Sinks of several widths share the ring. To pin it twice would leave CUDA an error for its next call.
    code = 0 if producer.is_pinned else torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(code) != 0:
        raise CannotCopyError(
            f"The ring ({memory.nbytes} bytes of shared memory) cannot be pinned: cudaHostRegister failed with "
            f"code {int(code)}. Raise the limit of locked memory (ulimit -l), or shrink the ring (--ring-mib)."
        )
    producer.is_pinned = True
    return int(memory.ctypes.data)  # the device reaches registered memory by the host's address


def check_copies(pool_memory: Tensor, ring: npt.NDArray[np.uint8], address: int, copies: HostCopies) -> None:
    """Copy blocks of known bytes as captured rows are copied later, and compare what arrives.

    Overwrites the start of both memories, and zeroes it afterwards: no block may be in use.

    Args:
        pool_memory: The memory of the block pool, [rows, hidden].
        ring: The ring's memory, pinned.
        address: The address at which the device reaches the ring.
        copies: Copies them.

    Raises:
        CannotCopyError: CUDA refuses a copy, or other bytes arrive.
    """
    for units in _CHECKED_UNITS:
        in_ring = len(ring) // (units * pool_memory.shape[1] * pool_memory.itemsize)
        positions = min(units, len(pool_memory) // units - 1, in_ring)
        if positions < 1:
            continue
        block = pool_memory[: units * (positions + 1)].view(units, positions + 1, -1)
        bytes_ = block.view(torch.uint8)
        bytes_.copy_((torch.arange(bytes_.numel()) % 251).view(bytes_.shape))  # a prime: neighbouring rows differ
        rows = block[:, :positions]
        try:
            copies.copy(rows, address)
            copies.wait()
            same = _arrived(rows, ring)
        except (CopyFailedError, OSError, AttributeError) as error:  # the last two: no driver, or not its function
            raise CannotCopyError(
                f"Rows cannot be copied from the device to the ring: {error}. It needs an NVIDIA GPU and its driver."
            ) from error
        bytes_.zero_()
        if not same:
            raise CannotCopyError(
                f"Rows copied from the device to the ring arrive changed ({units} units of {positions} positions). "
                "The driver or the IOMMU of this host does not map shared memory as CUDA promises. Update the driver, "
                "or use another host."
            )


def _arrived(rows: Tensor, ring: npt.NDArray[np.uint8]) -> bool:
    """Return whether the ring starts with these rows, and zero them there."""
    torch.cuda.synchronize(rows.device)
    arrived = ring[: rows.nbytes]
    same = np.array_equal(arrived, rows.contiguous().view(torch.uint8).flatten().cpu().numpy())
    arrived[:] = 0
    return same
