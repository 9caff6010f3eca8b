"""Tensor parallelism: how vLLM's ranks share the rows inside a layer, and how whole rows are made of their parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear

from inference_svc.taps.points import RowShape
from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from torch import Tensor, nn

    from inference_svc.taps.model.wide_places import WideEntry
    from inference_svc.taps.points import Site


_EXCHANGED_BYTES = 8 << 20
"""How much of the rows the ranks exchange at once. vLLM makes two tensors of this size."""


def num_ranks() -> int:
    """Return how many ranks share each layer."""
    return int(get_tp_group().world_size)


def own_rank() -> int:
    """Return which of the ranks that share its layers this one is."""
    return int(get_tp_group().rank_in_group)


def capturing_ranks() -> list[int]:
    """Return which of the ranks that share this one's layers capture. Every rank must call this.

    They are those on the machine of the first one. No shipper would reach the others, if the service runs there. If it
    runs on another machine, `engine.ranks` refuses the first one too.
    """
    if num_ranks() == 1:
        return [0]
    near = in_the_same_node_as(get_tp_group().cpu_group)
    return [rank for rank, is_near in enumerate(near) if is_near]


def shape_of(config: Any, site: Site.ValueType, entry: WideEntry) -> RowShape | None:
    """Return the shape of the rows before or after a module; None if it is not known how ranks share them.

    Args:
        config: vLLM's `VllmConfig`.
        site: A site whose rows have a width of their own.
        entry: The place before or after the module.
    """
    if num_ranks() == 1 or site == capture_pb2.SITE_ROUTING_WEIGHTS:
        return RowShape(entry.width)  # every rank chooses among all experts
    if isinstance(entry.module, Attention):
        copies = copies_of_keys(config, entry.module)
        return None if copies is None else _divided(entry.width, 1 if site == capture_pb2.SITE_Q else copies)
    if isinstance(entry.module, QKVParallelLinear):
        return _divided(entry.width, 1 if site == capture_pb2.SITE_Q_PRE else entry.module.num_kv_head_replicas)
    if entry.hidden is None:  # its output
        return RowShape(entry.width) if isinstance(entry.module, ReplicatedLinear) else None
    return _shape_of_input(entry.module, entry.width)


def copies_of_keys(config: Any, attention: Attention) -> int | None:
    """Return how many neighbouring ranks have the same keys and values. The queries are divided among all ranks.

    Args:
        config: vLLM's `VllmConfig`.
        attention: The attention of a layer.

    Returns:
        None if it is not known, because the layer has other heads than the model's configuration says.
    """
    if num_ranks() == 1:
        return 1
    model, parallel = config.model_config, config.parallel_config
    expected = (model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel))
    if (attention.num_heads, attention.num_kv_heads) != expected:
        return None
    return max(num_ranks() // int(model.get_total_num_kv_heads()), 1)


def _divided(width: int, copies: int) -> RowShape:
    return RowShape(width) if copies == num_ranks() else RowShape(width, num_ranks(), copies)


def _shape_of_input(module: nn.Module, width: int) -> RowShape | None:
    if not isinstance(module, LinearBase):
        return None
    if isinstance(module, RowParallelLinear) and module.tp_size > 1 and module.input_is_parallel:
        return RowShape(width, module.tp_size)
    return RowShape(width)  # each rank takes whole rows


def join(parts: Tensor, shape: RowShape, *, keep: bool) -> Tensor | None:
    """Exchange parts of rows. Every rank must call this, in the same order.

    Args:
        parts: This rank's part of the rows, [units, positions, width].
        shape: The shape of a row.
        keep: Return the rows.

    Returns:
        Whole rows, [units, positions, whole width]; None without `keep`.
    """
    units, positions, width = parts.shape
    whole = parts.new_empty(units, positions, shape.whole) if keep else None
    at_once = max(_EXCHANGED_BYTES // (positions * width * shape.ranks * parts.itemsize), 1)
    for first in range(0, units, at_once):
        # Only one rank needs them, but vLLM 0.32's `gather` to one rank waits forever on CPUs.
        joined = get_tp_group().all_gather(parts[first : first + at_once].contiguous(), dim=-1)
        if whole is not None:
            different = joined.view(len(joined), positions, -1, shape.copies, width)[:, :, :, 0]
            whole[first : first + at_once] = different.reshape(len(joined), positions, shape.whole)
    return whole


def join_numbers(numbers: Tensor) -> Tensor:
    """Return the numbers of all ranks, one after the other, on every rank. Every rank must call this."""
    group = get_tp_group()
    joined: Tensor = group.all_gather(numbers.to(group.device), dim=0)
    return joined
