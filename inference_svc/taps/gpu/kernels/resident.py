"""The tap on a GPU. At each point, one Triton kernel steers and captures every row in one pass.

A row's program says what is done to it (tables.py). Rows without a program, and padding, stay unchanged. The arithmetic
is that of operations.py, in float32, with two differences: the order in which a projection is summed, and that a vector
which is all that `tap` adds to a row is added to the hidden row itself, not to its sum with the residual.

There are two kernels, and both hold a whole row in registers. `tap` runs on its own after a layer (resident_tap.py).
`tap_norm` replaces the add and the RMS norm that follow a layer in most models (resident_norm.py). The kernels for
wider rows are in chunked.py, with those that only capture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import triton

from inference_svc.taps.gpu.kernels.launching import ALIGNMENT, Launcher
from inference_svc.taps.gpu.kernels.resident_norm import tap_norm_kernel
from inference_svc.taps.gpu.kernels.resident_rows import split, warps
from inference_svc.taps.gpu.kernels.resident_tap import tap_kernel
from inference_svc.taps.operations import reach

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from inference_svc.taps.bank import VectorBank
    from inference_svc.taps.blocks import BlockPool
    from inference_svc.taps.gpu.kernels.prepared import PreparedLaunch
    from inference_svc.taps.gpu.tables import ProgramTable

_launch_tap, _launch_tap_norm = Launcher(tap_kernel), Launcher(tap_norm_kernel)


@dataclass(frozen=True, eq=False)
class KernelTables:
    """The tables that the kernels read, all at fixed addresses."""

    rows: Tensor
    """Program (-1: none), place, stride and busy flag of each row, int32 [at least rows, `tables.ROW_FIELDS`]."""
    programs: ProgramTable
    bank: VectorBank
    pool: BlockPool | None
    """The capture blocks; None on a rank that only steers."""
    scratch: Tensor | None = None
    """Memory for `chunked.tap`, float32 [programs, width]; None if rows fit the registers."""
    scores: Tensor | None = None
    """Receives the scores of rows, float32 [rows, MAX_PROBE_OUTPUTS]; None if no row is scored."""
    prepared: dict[tuple[object, ...], PreparedLaunch | None] = field(default_factory=dict, init=False, repr=False)
    """Prepared launches that use these tables; None if Triton makes all of them. The key is all that may differ between
    launches, except addresses of rows and weights. Only the engine's thread may use them."""

    def destination(self, hidden: Tensor) -> Tensor:
        """Return the memory of the capture blocks; without them any tensor, which is not written."""
        return self.pool.memory if self.pool is not None else hidden

    def arguments(self, hidden: Tensor, point: int) -> tuple[object, ...]:
        """Return the arguments that both kernels share, in their order."""
        programs, bank = self.programs, self.bank
        return (
            self.rows,
            programs.lines,
            programs.entries,
            bank.vectors,
            bank.inverse_norms,
            self.destination(hidden),
            self.scores if self.scores is not None else bank.inverse_norms,  # not written without operations that score
            point,
            programs.lines.shape[1],
            reach(hidden.dtype),
        )


def tap(hidden: Tensor, residual: Tensor | None, point: int, tables: KernelTables) -> None:
    """Steer and capture the sums `hidden` + `residual`, each [rows, hidden]. Changes `hidden` in place."""
    rows, width = hidden.shape
    if not rows:
        return
    other = residual if residual is not None else hidden
    residual_stride = residual.stride(0) if residual is not None else 0
    key = (
        *("tap", point, width, hidden.dtype, other.dtype),
        *(hidden.stride(0), residual_stride, residual is not None),
    )
    addresses = hidden.data_ptr(), other.data_ptr()
    if _launch_prepared(tables, key, rows, addresses):
        return
    head, tail = split(width)
    _launch(
        _launch_tap,
        tables,
        key,
        rows,
        (hidden, other, *tables.arguments(hidden, point), hidden.stride(0), residual_stride),
        addresses,
        {"HAS_RESIDUAL": residual is not None, "WIDTH": width, "HEAD": head, "TAIL": tail},
        _options(tap_kernel, width, hidden.dtype, hidden.device, has_residual=residual is not None),
    )


def tap_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    point: int,
    tables: KernelTables,
    *,
    plus_one: bool,
) -> tuple[Tensor, Tensor]:
    """Steer and capture the sums `hidden` + `residual`, and compute their RMS norm. Changes neither input.

    Args:
        hidden: [rows, hidden].
        residual: [rows, hidden].
        weight: The weight of the norm, [hidden].
        epsilon: The epsilon of the norm.
        point: The tap point.
        tables: The tables.
        plus_one: Whether the norm multiplies by weight + 1 (Gemma) instead of weight.

    Returns:
        The norm of the steered sum, and the steered sum, each [rows, hidden] in the dtype of `hidden`.
    """
    rows, width = hidden.shape
    # This takes half the time of `new_empty`.
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    summed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if not rows:
        return normed, summed
    key = (
        *("norm", point, width, hidden.dtype, residual.dtype, weight.dtype),
        *(hidden.stride(0), residual.stride(0), epsilon, plus_one),
    )
    addresses = (
        *(hidden.data_ptr(), residual.data_ptr(), weight.data_ptr()),
        *(normed.data_ptr(), summed.data_ptr()),
    )
    if _launch_prepared(tables, key, rows, addresses):
        return normed, summed
    head, tail = split(width)
    _launch(
        _launch_tap_norm,
        tables,
        key,
        rows,
        (
            *(hidden, residual, weight, normed, summed, *tables.arguments(hidden, point)),
            *(hidden.stride(0), residual.stride(0), epsilon),
        ),
        addresses,
        {
            "PLUS_ONE": 1.0 if plus_one else 0.0,
            "MULTIPROCESSORS": _multiprocessors(hidden.device),
            "WIDTH": width,
            "HEAD": head,
            "TAIL": tail,
        },
        _options(tap_norm_kernel, width, hidden.dtype, hidden.device, has_residual=True),
    )
    return normed, summed


def _launch_prepared(tables: KernelTables, key: tuple[object, ...], rows: int, addresses: tuple[int, ...]) -> bool:
    """Launch a kernel for rows at these addresses, if that was prepared. Return whether it was."""
    prepared = tables.prepared.get(key)
    if prepared is None:
        return False
    for address in addresses:
        if address % ALIGNMENT:
            return False  # Triton compiled other code for such addresses
    prepared(rows, *addresses)
    return True


def _launch(
    launcher: Launcher,
    tables: KernelTables,
    key: tuple[object, ...],
    rows: int,
    arguments: Sequence[Any],
    addresses: Sequence[int],
    constants: Mapping[str, object],
    options: _Options,
) -> None:
    """Launch a kernel, and prepare its next launches, in which only the addresses of the first arguments differ."""
    launcher((rows, 1, 1), arguments, constants, **options)
    # Without a pool, an argument stands for it, and its address changes.
    if tables.pool is not None and key not in tables.prepared and launcher.may_prepare(addresses):
        tables.prepared[key] = launcher.prepare(arguments, constants, len(addresses), **options)


_FITS_72 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
"""Whether `tap_kernel` fits into 72 registers. The compiler of Triton 3.9 needs more, and would spill some."""
_REGISTERS: dict[tuple[object, bool], dict[int, int]] = {
    (tap_kernel, True): {2560: 72 if _FITS_72 else 80, 4096: 128},
    (tap_norm_kernel, True): {1536: 72, 2048: 72, 2560: 96, 3072: 96, 4096: 128},
}
"""The most registers of a thread for 16-bit rows, by the kernel, whether rows have a residual, and their width.

The fewer registers a thread needs, the more rows a multiprocessor holds. With too few, the compiler loads vectors only
after the row has arrived, or spills registers. A test compiles all kernels for several GPUs, and allows no spills.
Float32 rows need more registers, so they have no limits.
"""

_LIMITED_GENERATION = 9
"""The first number of the compute capability of the GPUs with these limits: Hopper's, on which they were measured. On
other GPUs, some of them make threads spill registers."""


class _Options(TypedDict):
    num_warps: int
    maxnreg: int | None


@cache
def _options(kernel: object, width: int, dtype: torch.dtype, device: torch.device, *, has_residual: bool) -> _Options:
    """Return with how many warps and registers a kernel is launched. None leaves registers to the compiler."""
    is_limited = dtype.itemsize == 2 and _generation(device) == _LIMITED_GENERATION  # noqa: PLR2004 - 16 bits
    limit = _REGISTERS.get((kernel, has_residual), {}).get(width) if is_limited else None
    return {"num_warps": warps(*split(width)), "maxnreg": limit}


def _generation(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability; 0 for a CPU, where Triton's interpreter runs kernels."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; for a CPU any number, so that tests reorder rows."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
