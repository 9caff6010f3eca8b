"""What goes into transformers' function for eager attention, and out: queries, keys, values and attention weights."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

Heads = Mapping[str, Tensor]
"""The rows at the sites q, k and v, [positions, heads x size]; and the weights, [heads, positions, positions]."""
WEIGHTS = "weights"
"""The key of the weights."""

_FUNCTION = "eager_attention_forward"
_RECORD = "_record_heads"


def record_heads(attention: nn.Module, record: Callable[[Heads], None]) -> None:
    """Record what goes through each call of an attention module, if its model has the usual function."""
    module = sys.modules[type(attention).__module__]
    function = getattr(module, _FUNCTION, None)
    if function is None:
        return
    if not hasattr(function, _RECORD):
        setattr(module, _FUNCTION, _recording(function))
    setattr(attention, _RECORD, record)


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        found = function(module, query, key, value, *args, **options)
        record = cast("Callable[[Heads], None] | None", getattr(module, _RECORD, None))
        if record is not None:
            # OPT scales the queries before it gives them away.
            scale = float(module.scaling) if options.get("scaling") == 1.0 else 1.0
            record({"q": _rows(query) / scale, "k": _rows(key), "v": _rows(value), WEIGHTS: found[1][0]})
        return found

    setattr(call, _RECORD, True)
    return call


def _rows(heads: Tensor) -> Tensor:
    """Return heads, [1, heads, positions, size], as rows."""
    return heads[0].transpose(0, 1).flatten(1)
