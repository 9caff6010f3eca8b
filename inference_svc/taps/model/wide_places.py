"""The places in a layer whose rows have a width of their own, found in the calls of one run; see `structure`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from inference_svc.taps.model.calls import has_parameters, is_norm
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from inference_svc.taps.model.calls import Argument, Call


class WideEntry(NamedTuple):
    """A place just before or after a call of a module, where rows have a width of their own."""

    module: nn.Module
    hidden: Argument | None
    """The argument that has the rows; None: they are the module's output."""
    width: int
    tap: Callable[[int], None] | None = None
    """Puts the tap of a point there, if a hook of the module does not see the rows."""
    first: int | None = None
    """If the rows are columns of the module's output: the first of them."""


HEADS = (capture_pb2.SITE_Q, capture_pb2.SITE_K, capture_pb2.SITE_V)
"""Queries, keys and values as the attention takes them."""
PROJECTED = (capture_pb2.SITE_Q_PRE, capture_pb2.SITE_K_PRE)
"""Queries and keys as their projection returns them."""


def find_router(calls: list[Call], layer: Call, attention: Call | None, num_experts: int) -> WideEntry | None:
    """Find the module beside the attention that returns a number for each token and expert, if there is only one.

    A router may have a module for its logits within it.
    """
    shape = (layer.output[0].shape[-2], num_experts)
    found = [
        call
        for call in calls[layer.entered + 1 : layer.left]
        if not (attention is not None and attention.entered <= call.entered < attention.left)
        and (call.output and call.output[0].shape == shape and has_parameters(call.module))
    ]
    inner = [call for call in found if not any(call.entered < other.entered < call.left for other in found)]
    return WideEntry(inner[0].module, None, num_experts) if len(inner) == 1 else None


def before_projection(calls: list[Call], part: Call) -> WideEntry | None:
    """Return what the output projection of a part takes: the last module of the part, whose output is the part's.

    The projection may be the part itself. In a mixture of experts, it is not a module that is called.
    """
    inside = [other for other in calls[part.entered + 1 : part.left] if other.output and not is_norm(other.module)]
    ends = [other for other in inside if other.output[0] is part.output[0] and has_parameters(other.module)]
    last = ends[-1] if ends else part
    given = [(argument, tensor) for argument, tensor in last.tensors() if _is_rows(tensor)]
    if len(given) != 1 or (last is part and inside) or given[0][1].shape[:-1] != part.output[0].shape[:-1]:
        return None
    argument, rows = given[0]
    if ends and any(rows is tensor for _, tensor in part.tensors()):
        return None  # the module takes what the part takes, so it is the whole part
    return WideEntry(last.module, argument, rows.shape[-1])


def _is_rows(tensor: Tensor) -> bool:
    """Return whether a tensor is [tokens, width], or [1, tokens, width] as in models from transformers."""
    return tensor.dim() == 2 or (tensor.dim() == 3 and len(tensor) == 1)  # noqa: PLR2004 - see above


class Heads(NamedTuple):
    """Queries, keys and values as the attention takes them."""

    call: Call
    """The call of the attention."""
    rows: list[tuple[Argument, Tensor]]
    """The argument of each, and its rows, [tokens, heads x size]."""


def find_heads(calls: list[Call], part: Call, is_attention: Callable[[nn.Module], bool]) -> Heads | None:
    """Return queries, keys and values as the attention takes them; None if it takes something else."""
    inside = [other for other in calls[part.entered : part.left] if is_attention(other.module)]
    if len(inside) != 1:
        return None
    call = inside[0]
    given = list(call.tensors())[: len(HEADS)]
    rows = [tensor for _, tensor in given]
    if len(rows) != len(HEADS) or any(tensor.dim() != 2 for tensor in rows):  # noqa: PLR2004 - [tokens, heads x size]
        return None
    query, key, value = (tensor.shape[1] for tensor in rows)
    if key != value or query % key or len({len(tensor) for tensor in rows}) != 1:
        return None  # such as keys that are compressed
    return Heads(call, given)


def find_projected(calls: list[Call], part: Call, heads: Heads) -> list[WideEntry]:
    """Return queries and keys as one projection returns them together with the values; empty if none does.

    `parts_check.other_projections` finds out whether they become the attention's queries and keys.
    """
    query, key, value = (rows for _, rows in heads.rows)
    first_of_values = query.shape[1] + key.shape[1]
    shape = (len(query), first_of_values + value.shape[1])
    for call in calls[part.entered : heads.call.entered]:
        # With a second output, such as a bias, the model may still add something.
        is_projection = len(call.output) == 1 and call.output[0].shape == shape and has_parameters(call.module)
        if is_projection and call.output[0][:, first_of_values:].equal(value):
            return [
                WideEntry(call.module, None, query.shape[1], first=0),
                WideEntry(call.module, None, key.shape[1], first=query.shape[1]),
            ]
    return []
