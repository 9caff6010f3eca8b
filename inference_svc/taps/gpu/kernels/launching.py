"""Launches Triton kernels in less than half of the time that Triton's own launcher needs.

A launch by `function[grid](...)` binds the arguments, looks for the kernel that was compiled for such arguments, and
compares global variables: tens of microseconds on the engine's thread, for each layer of a step that runs outside CUDA
graphs. A `Launcher` keeps the compiled kernel, and calls it directly on the current stream. Launch hooks of profilers
are called as usual, `pre_run_hooks` are not. Triton's settings for debugging (`triton.knobs`) are read when a kernel is
launched with such arguments for the first time.

What Triton compiles into a kernel must be in the key with which the kernel is found again. Otherwise it would compute
wrong rows, without an error. Of a pointer this is its type and whether its address is a multiple of 16; of an integer
whether it is 1, a multiple of 16, or has more than 32 bits. So the key has the integers themselves. Those on which a
kernel is not specialised (`do_not_specialize`) may have any number of values: of them, it has only whether 32 bits are
enough. On GPUs of AMD, Triton also specialises on the size of tensors, so no kernel is kept there.

If most arguments never change, `Launcher.prepare` saves more than half of the time that is left (`prepared.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from inference_svc.taps.gpu.kernels.prepared import prepare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inference_svc.taps.gpu.kernels.prepared import PreparedLaunch

_TESTED = {(3, 6), (3, 7), (3, 9)}
"""The versions of Triton with which this is tested (`make test-triton`). With others, no kernel is kept."""
_INT32 = 1 << 31
ALIGNMENT = 16
"""Triton compiles other code for addresses that are multiples of it."""


class Launcher:
    """Launches one Triton kernel."""

    def __init__(self, function: Any) -> None:
        """Launch a function that `triton.jit` returned. In Triton's interpreter, no kernel is compiled and kept."""
        self._function = function
        self._kept: dict[tuple[object, ...] | None, Any] = {}
        self._keeping = _keeping(function)

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: Mapping[str, object],
        *,
        num_warps: int,
        maxnreg: int | None = None,
    ) -> None:
        """Launch the kernel on the current device and stream.

        Args:
            grid: The numbers of programs.
            arguments: All parameters of the function, in their order, except its constants.
            constants: The constants by name, in the order of the function's parameters, after all others.
            num_warps: The warps of a program.
            maxnreg: The most registers of a thread; None leaves it to the compiler.
        """
        key = None
        if self._keeping is not None:
            driver, specialised = self._keeping
            device = driver.active.get_current_device()
            key = _key(device, arguments, specialised, constants, num_warps, maxnreg)
            compiled = self._kept.get(key)
            if compiled is not None:
                stream = driver.active.get_current_stream(device)
                compiled[grid](*arguments, *constants.values(), stream=stream)
                return
        if (*self._function.arg_names[len(arguments) :],) != (*constants,):
            raise ValueError(f"These are not all parameters after {len(arguments)} arguments: {', '.join(constants)}")
        compiled = self._function[grid](*arguments, **constants, num_warps=num_warps, maxnreg=maxnreg)
        if key is not None and compiled is not None:
            self._kept[key] = compiled

    def may_prepare(self, addresses: Sequence[int]) -> bool:
        """Return whether launches may be prepared now, after one with these addresses.

        A profiler's launch hooks are not called for prepared launches. So none are prepared while there are hooks.
        """
        is_aligned = not any(address % ALIGNMENT for address in addresses)
        return self._keeping is not None and is_aligned and not _has_hooks()

    def prepare(
        self,
        arguments: Sequence[Any],
        constants: Mapping[str, object],
        changing: int,
        *,
        num_warps: int,
        maxnreg: int | None = None,
    ) -> PreparedLaunch | None:
        """Prepare further launches on the current device, of which only some arguments change.

        Call `may_prepare` first.

        Args:
            arguments: The arguments of a launch, as it was made.
            constants: Its constants.
            changing: How many of the arguments, from the first on, change: addresses, or integers on which the kernel
                is not specialised.
            num_warps: Its warps.
            maxnreg: The most registers of a thread, as in that launch.

        Returns:
            The launch; None if Triton has to make it.
        """
        if self._keeping is None:
            return None
        driver, specialised = self._keeping
        device = driver.active.get_current_device()
        compiled = self._kept.get(_key(device, arguments, specialised, constants, num_warps, maxnreg))
        if compiled is None:
            return None
        stream = partial(driver.active.get_current_stream, device)
        return prepare(compiled, (*arguments, *constants.values()), changing, stream)


def _has_hooks() -> bool:
    """Return whether a profiler wants to know of each launch."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def _key(
    device: int,
    arguments: Sequence[Any],
    specialised: Sequence[bool],
    constants: Mapping[str, object],
    num_warps: int,
    maxnreg: int | None,
) -> tuple[object, ...] | None:
    """Return all that Triton may compile into the kernel; None if it cannot be told."""
    parts: list[object] = [device, num_warps, maxnreg, *constants]
    add = parts.append
    for value in constants.values():
        add(type(value))  # because True == 1 == 1.0
        add(value)
    # An argument adds one part, a pointer two of which the first is its type: no two lists of them look the same.
    for argument, is_specialised in zip(arguments, specialised, strict=False):
        kind = type(argument)
        if kind is Tensor:
            add(argument.dtype)
            add(argument.data_ptr() % ALIGNMENT)
        elif kind is int:
            add(argument if is_specialised or not -_INT32 <= argument < _INT32 else int)
        elif kind is float:
            add(float)  # whatever its value
        elif argument is None:
            add(None)
        elif hasattr(kind, "data_ptr"):
            add(argument.dtype)
            add(argument.data_ptr() % ALIGNMENT)
        else:
            return None
    return tuple(parts)


def _keeping(function: Any) -> tuple[Any, tuple[bool, ...]] | None:
    """Return Triton's driver, and of which parameters the values are compiled into kernels; None: keep no kernels."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version not in _TESTED or torch.version.hip:
        return None
    try:
        if not (isinstance(function, triton.JITFunction) and callable(triton.compiler.CompiledKernel.__getitem__)):
            return None
        return triton.runtime.driver, tuple(not parameter.do_not_specialize for parameter in function.params)
    except AttributeError:  # Triton lacks one of these private parts
        return None
