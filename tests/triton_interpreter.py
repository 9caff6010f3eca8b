"""Import this before anything imports Triton: all kernels then run on the CPU, in Triton's interpreter.

The interpreter puts its own functions into `triton.language`, which takes 1 ms. It does so again in each call that a
kernel makes, which is half of its work. With this module it does so once for each module with kernels, for as long as
the program runs.

It also computes whether sums of integers overflow, and throws the results away, because it does not run kernels' debug
assertions. With this module it does not compute them. And it makes a table of all types to look one up; here it does so
once for each type.

Most of the rest is bookkeeping: it describes the type and the shape of each tensor anew, and compares shapes in objects
of its own. With this module equal types share one description, as do their tensors, and shapes are compared as lists.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.language import core
from triton.language.semantic import TritonSemantic
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

_describe: Any = core.tensor.__init__


def _init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    known = kind.__dict__.get("_of_tensors")
    if known is None:
        _describe(tensor, handle, kind)
        kind._of_tensors = dict(tensor.__dict__)
        kind._of_tensors.pop("handle")
    else:
        tensor.__dict__.update(known)
        tensor.handle = handle


core.tensor.__init__ = _init_tensor

_init_block: Any = core.block_type.__init__
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}


def _init_block_once(block: Any, element: Any, shape: Any) -> None:
    if element.is_ptr():  # its name does not say all of it
        _init_block(block, element, shape)
        return
    key = (element.name, *map(operator.index, shape))
    known = _blocks.get(key)
    if known is None:
        _init_block(block, element, shape)
        _blocks[key] = block.__dict__
    else:
        block.__dict__ = known


core.block_type.__init__ = _init_block_once

_broadcast: Any = TritonSemantic.broadcast_impl_value


def _broadcast_if_different(semantic: Any, left: Any, right: Any) -> Any:
    if left.type.is_block() and right.type.is_block() and list(left.type.shape) == list(right.type.shape):
        return left, right
    return _broadcast(semantic, left, right)


TritonSemantic.broadcast_impl_value = _broadcast_if_different
