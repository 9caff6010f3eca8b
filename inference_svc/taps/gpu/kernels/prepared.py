"""Launches of a compiled kernel that differ only in a few arguments.

Outside CUDA graphs, Python launches the tap once per layer and step. Most arguments are then those of the step before:
only the addresses of rows and weights may differ. A `PreparedLaunch` holds all arguments in the form in which CUDA's
driver takes them. To launch the kernel, it writes those that changed and calls the driver. Triton's launcher would
convert every argument anew.

The driver copies the arguments from memory, as the machine code declares them. So these declarations are read from the
kernel's PTX and compared with the arguments. If anything is not as expected, no launch is prepared.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from inference_svc.taps.gpu.driver import patient_library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)")
_POINTER = frozenset({"u64", "b64"})
_DECLARED: dict[str, tuple[frozenset[str], Any]] = {
    "i32": (frozenset({"u32", "b32", "s32"}), ctypes.c_int32),
    "i64": (frozenset({"u64", "b64", "s64"}), ctypes.c_int64),
    "fp32": (frozenset({"f32", "b32"}), ctypes.c_float),
}
"""For types of Triton's arguments that are not pointers: how PTX may declare them, and their C type."""
_LANES = 32
"""Threads of a warp."""
_MOST_SHARED_BYTES = 48 << 10
"""Shared memory that any launch may have. More has to be requested."""
_OWN_PARAMETERS = 2
"""The parameters that Triton adds to a kernel: the addresses of memory for itself, which these kernels do not need."""


class LaunchError(RuntimeError):
    """CUDA's driver refused a launch."""


class PreparedLaunch:
    """Launches one kernel with new first arguments. Only one thread at a time may use it."""

    def __init__(
        self, compiled: Any, slots: Sequence[Any], changing: int, stream: Callable[[], int], launch: Any
    ) -> None:
        """Prepare launches.

        Args:
            compiled: The kernel, as Triton returned it.
            slots: All arguments, as the machine code takes them.
            changing: How many of them, from the first on, change.
            stream: Returns the current stream.
            launch: The driver's function.
        """
        self._slots = slots[:changing]
        self._arguments = (ctypes.c_void_p * len(slots))(*map(ctypes.addressof, slots))
        self._held = compiled, slots  # the driver reads this memory
        self._function = compiled.function
        self._threads = _LANES * compiled.metadata.num_warps
        self._shared = compiled.metadata.shared
        self._stream = stream
        self._launch = launch

    def __call__(self, programs: int, *values: int) -> None:
        """Launch the kernel on the current stream.

        Args:
            programs: The number of programs.
            values: The arguments that change: integers, and addresses that are multiples of `launching.ALIGNMENT`.

        Raises:
            LaunchError: The driver refused the launch.
        """
        for slot, value in zip(self._slots, values, strict=True):
            slot.value = value
        code = self._launch(
            self._function,
            *(programs, 1, 1),
            *(self._threads, 1, 1),
            self._shared,
            self._stream(),
            self._arguments,
            None,
        )
        if code:
            raise LaunchError(f"CUDA's driver did not launch a kernel: cuLaunchKernel returned error {code}.")


def prepare(compiled: Any, arguments: Sequence[Any], changing: int, stream: Callable[[], int]) -> PreparedLaunch | None:
    """Return a prepared launch of a compiled kernel; None if Triton has to make its launches.

    Args:
        compiled: The kernel, as Triton returned it.
        arguments: The arguments of a launch, constants included, one for each parameter of the function.
        changing: How many of them, from the first on, change.
        stream: Returns the current stream.
    """
    launch = _driver_launch()
    if launch is None:
        return None
    try:
        if not _is_plain(compiled.metadata):
            return None
        slots = _slots(compiled.src, arguments, changing, _declared(compiled.asm["ptx"]))
        return None if slots is None else PreparedLaunch(compiled, slots, changing, stream, launch)
    except (AttributeError, LookupError, TypeError):  # Triton has changed
        return None


def _is_plain(metadata: Any) -> bool:
    """Return whether a launch needs nothing but a grid, threads, shared memory and arguments."""
    return (
        metadata.num_ctas == 1
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
        and not metadata.launch_cooperative_grid
        and not metadata.launch_pdl
        and not getattr(metadata, "instrumentation_mode", "")
        and metadata.shared <= _MOST_SHARED_BYTES
    )


def _declared(ptx: str) -> list[str]:
    """Return the types of a kernel's parameters."""
    entry = _ENTRY.search(ptx)
    return _PARAMETER.findall(entry.group(1)) if entry else []


def _slots(source: Any, arguments: Sequence[Any], changing: int, declared: Sequence[str]) -> list[Any] | None:
    """Return the arguments of the machine code as C values; None if it declares something unexpected."""
    names = source.fn.arg_names
    passed = [at for at, name in enumerate(names) if source.signature[name] != "constexpr"]
    own = declared[len(passed) :]
    if len(declared) < len(passed) or len(own) > _OWN_PARAMETERS or not _POINTER.issuperset(own):
        return None
    if passed[:changing] != [*range(changing)]:
        return None
    slots: list[Any] = []
    for at, actual in zip(passed, declared, strict=False):
        kind = source.signature[names[at]]
        types, c_type = (_POINTER, ctypes.c_void_p) if kind.startswith("*") else _DECLARED[kind]
        if actual not in types:
            return None
        slots.append(c_type(arguments[at].data_ptr() if kind.startswith("*") else arguments[at]))
    return [*slots, *(ctypes.c_void_p() for _ in own)]


@cache
def _driver_launch() -> Any:
    """Return `cuLaunchKernel`; None without CUDA's driver."""
    try:
        launch = patient_library().cuLaunchKernel
    except (OSError, AttributeError):
        return None
    launch.argtypes = (ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3)
    return launch
