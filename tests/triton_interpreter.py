"""Import this before anything imports Triton: all kernels then run on the CPU, in Triton's interpreter.

The interpreter puts its own functions into `triton.language`, which takes 1 ms. It does so again in each call that a
kernel makes, which is half of its work. With this module it does so once for each module with kernels, for as long as
the program runs.

It also computes whether sums of integers overflow, and throws the results away, because it does not run kernels' debug
assertions. With this module it does not compute them. And it makes a table of all types to look one up; here it does so
once for each type.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch: Any = interpreter._patch_lang
_patched: set[int] = set()


def _patch_once(function: Any) -> Any:
    module = id(function.__globals__)
    if module not in _patched:
        _patched.add(module)
        _patch(function)
    return interpreter._LangPatchScope()  # the end of a kernel restores nothing


interpreter._patch_lang = _patch_once

_builder: Any = interpreter.interpreter_builder
if not _builder.options.debug:
    _builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)

_np_dtype = interpreter._get_np_dtype
_np_dtype_once = functools.cache(_np_dtype)


def _get_np_dtype(kind: Any) -> Any:
    scalar = kind.scalar  # a block has the type of its elements
    return _np_dtype(scalar) if scalar.is_ptr() else _np_dtype_once(scalar)


interpreter._get_np_dtype = _get_np_dtype
