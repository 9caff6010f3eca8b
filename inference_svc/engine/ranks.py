"""Checks of what the ranks of an engine answer: no call failed, and together they capture the whole model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from svc_common.machine import machine_id

if TYPE_CHECKING:
    from collections.abc import Sequence

_REPORT = "This is a defect of residuum: please report it, with the engine's parallel sizes."


class UntappedLayersError(RuntimeError):
    """The ranks do not capture the whole model, or no shipper reaches them. The message names the ranks."""


class RankFailedError(RuntimeError):
    """A call failed in some workers. The message names the ranks and their errors."""


def check_answers(method: str, replicas: Sequence[Sequence[Any]]) -> None:
    """Check that a method of the workers failed on no rank.

    Args:
        method: The method's name.
        replicas: The answers of each replica's ranks. A text is the error of a rank that failed; see
            `taps.vllm.worker`.

    Raises:
        RankFailedError: It failed.
    """
    errors = [
        f"{_of_replica(index, replicas)}rank {rank}: {answer}"
        for index, answers in enumerate(replicas)
        for rank, answer in enumerate(answers)
        if isinstance(answer, str)
    ]
    if errors:
        raise RankFailedError(
            f"{method} failed in {len(errors)} of {sum(map(len, replicas))} workers ({'; '.join(errors)}). The "
            "workers' log has the tracebacks."
        )


def check_replicas(replicas: Sequence[Sequence[dict[str, Any]]], num_layers: int) -> None:
    """Check the ranks of each replica; see `check_ranks`.

    Args:
        replicas: The descriptions of each replica's ranks; see `TappedWorker.residuum_describe`.
        num_layers: Decoder layers of the whole model.

    Raises:
        UntappedLayersError: The ranks of a replica do not pass.
    """
    for index, ranks in enumerate(replicas):
        try:
            check_ranks(ranks, num_layers)
        except UntappedLayersError as error:
            raise UntappedLayersError(f"{_of_replica(index, replicas)}{error}") from None


def check_ranks(ranks: Sequence[dict[str, Any]], num_layers: int) -> None:
    """Check that capturing ranks hold each layer, and that shippers reach all these ranks.

    The ranks that share a layer divide the requests. So several of them may capture, but no two may have the same place
    in their tensor-parallel group.

    Args:
        ranks: The description of each rank of one replica; see `TappedWorker.residuum_describe`.
        num_layers: Decoder layers of the whole model.

    Raises:
        UntappedLayersError: No rank captures a layer, or two ranks would capture the same requests, or no shipper
            reaches a rank. Or the ranks have rows of different widths.
    """
    capturing = [rank for rank in ranks if rank["captures"]]
    held = [(rank["tensor_rank"], layer) for rank in capturing for layer in _layers_of(rank)]
    missing = sorted(set(range(num_layers)) - {layer for _, layer in held})
    if missing:
        layers = ", ".join(map(str, missing))
        raise UntappedLayersError(
            f"No rank captures layers {layers}; those captured are {_named(capturing)}. {_REPORT}"
        )
    if len(held) > len(set(held)):
        raise UntappedLayersError(f"Several ranks would capture the same rows: {_named(capturing)}. {_REPORT}")
    widths = {tuple(rank["site_widths"]) for rank in ranks}
    if len(widths) > 1:
        raise UntappedLayersError(
            f"Rows at the same site must have the same width in all pipeline stages, and have {sorted(widths)} "
            "elements at the sites of --capture-sites. Use one stage, or leave out the sites that differ."
        )
    unreached = [
        rank
        for rank in capturing
        if rank["machine"] != machine_id() or not os.path.exists(rank["control_path"])  # noqa: PTH110
    ]
    if unreached:
        raise UntappedLayersError(
            f"No shipper of this service reaches the rows of {_named(unreached)}, which run on another machine. Run "
            "the first rank of each pipeline stage on the machine of the service."
        )


def _of_replica(index: int, replicas: Sequence[object]) -> str:
    """Return what names a replica in front of a message; nothing if there is only one."""
    return f"replica {index}: " if len(replicas) > 1 else ""


def _layers_of(rank: dict[str, Any]) -> range:
    return range(rank["first_layer"], rank["first_layer"] + rank["num_layers"])


def _named(ranks: Sequence[dict[str, Any]]) -> str:
    """Return the ranks and their layers as text."""
    return ", ".join(f"rank {rank['rank']}: {_layers_of(rank)[0]}–{_layers_of(rank)[-1]}" for rank in ranks) or "none"
