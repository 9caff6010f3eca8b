"""Launches of a compiled kernel that differ only in a few addresses.

Outside CUDA graphs, Python launches the tap once per layer and step. All arguments but the addresses of the rows are
then the same as in the step before. A `PreparedLaunch` holds them in the form in which CUDA's driver takes them. To
launch the kernel, it writes the addresses and calls the driver. Triton's launcher would convert every argument anew.

The driver copies the arguments from memory, as the machine code declares them. So these declarations are read from the
kernel's PTX and compared with the arguments. If anything is not as expected, no launch is prepared.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import TYPE_CHECKING, Any

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


class LaunchError(RuntimeError):
    """CUDA's driver refused a launch."""


class PreparedLaunch:
    """Launches one kernel with new addresses. Only one thread at a time may use it."""

    def __init__(
        self, compiled: Any, slots: Sequence[Any], changing: Sequence[int], stream: Callable[[], int], launch: Any
    ) -> None:
        """Prepare launches.

        Args:
            compiled: The kernel, as Triton returned it.
            slots: All arguments, as the machine code takes them.
            changing: Which of them are the addresses that change.
            stream: Returns the current stream.
            launch: The driver's function.
        """
        self._slots = [slots[at] for at in changing]
        self._arguments = (ctypes.c_void_p * len(slots))(*map(ctypes.addressof, slots))
        self._held = compiled, slots  # the driver reads this memory
        self._function = compiled.function
        self._threads = _LANES * compiled.metadata.num_warps
        self._shared = compiled.metadata.shared
        self._stream = stream
        self._launch = launch

    def __call__(self, programs: int, *addresses: int) -> None:
        """Launch the kernel on the current stream.

        Args:
            programs: The number of programs.
            addresses: The addresses that change. They must be multiples of 16 if the first ones were.

        Raises:
            LaunchError: The driver refused the launch.
        """
        for slot, address in zip(self._slots, addresses, strict=True):
            slot.value = address
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
            raise LaunchError(f"cuLaunchKernel returned error {code} of CUDA's driver")


def prepare(
    compiled: Any, arguments: Sequence[Any], changing: Sequence[int], stream: Callable[[], int]
) -> PreparedLaunch | None:
    """Return a prepared launch of a compiled kernel; None if its launches are better left to Triton.

    Args:
        compiled: The kernel, as Triton returned it.
        arguments: The arguments of a launch, constants included, one for each parameter of the function.
        changing: Which of them are the pointers that change.
        stream: Returns the current stream.
    """
    launch = _driver_launch()
    if launch is None:
        return None
    try:
        if not _is_plain(compiled.metadata):
            return None
        declared = _declared(compiled.asm["ptx"])
        slots = _slots(compiled.src, arguments, declared)
    except (AttributeError, KeyError, TypeError):  # Triton has changed
        return None
    if slots is None or not slots.keys() >= set(changing):
        return None
    rest = declared[len(slots) :]
    if not _POINTER.issuperset(rest):
        return None
    places = list(slots)
    return PreparedLaunch(
        compiled,
        [*slots.values(), *(ctypes.c_void_p() for _ in rest)],  # the rest is Triton's own memory: none is needed
        [places.index(at) for at in changing],
        stream,
        launch,
    )


def _is_plain(metadata: Any) -> bool:
    """Return whether a launch needs nothing but a grid, threads, shared memory and arguments."""
    return (
        metadata.num_ctas == 1
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
        and not metadata.launch_cooperative_grid
        and not metadata.launch_pdl
    )


def _declared(ptx: str) -> list[str]:
    """Return the types of a kernel's parameters."""
    entry = _ENTRY.search(ptx)
    return _PARAMETER.findall(entry.group(1)) if entry else []


def _slots(source: Any, arguments: Sequence[Any], declared: Sequence[str]) -> dict[int, Any] | None:
    """Return the arguments that are parameters of the machine code, as C values, by their places.

    Returns:
        None if a parameter is missing, or has an unexpected type.
    """
    names = source.fn.arg_names
    kinds = {at: source.signature[name] for at, name in enumerate(names) if source.signature[name] != "constexpr"}
    if len(declared) < len(kinds):
        return None
    slots: dict[int, Any] = {}
    for (at, kind), actual in zip(kinds.items(), declared, strict=False):
        types, c_type = (_POINTER, ctypes.c_void_p) if kind.startswith("*") else _DECLARED[kind]
        if actual not in types:
            return None
        slots[at] = c_type(arguments[at].data_ptr() if kind.startswith("*") else arguments[at])
    return slots


@cache
def _driver_launch() -> Any:
    """Return `cuLaunchKernel`; None without CUDA's driver."""
    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return None
    launch.argtypes = (ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3)
    return launch
