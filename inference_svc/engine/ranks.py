"""Checks of what the ranks of an engine answer: no call failed, and together they capture the whole model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """Check that in each replica exactly one capturing rank holds each layer, and that shippers reach all these ranks.

    Args:
        replicas: The descriptions of each replica's ranks; see `TappedWorker.residuum_describe`.
        num_layers: Decoder layers of the whole model.

    Raises:
        UntappedLayersError: In a replica, no rank captures a layer, or two ranks do, or a rank on another machine does.
    """
    for index, ranks in enumerate(replicas):
        try:
            check_ranks(ranks, num_layers)
        except UntappedLayersError as error:
            raise UntappedLayersError(f"{_of_replica(index, replicas)}{error}") from None


def check_ranks(ranks: Sequence[dict[str, Any]], num_layers: int) -> None:
    """Check that exactly one capturing rank holds each layer, and that shippers reach all these ranks.

    Args:
        ranks: The description of each rank of one replica; see `TappedWorker.residuum_describe`.
        num_layers: Decoder layers of the whole model.

    Raises:
        UntappedLayersError: No rank captures a layer, or two ranks do, or a rank on another machine does. Or the ranks
            have rows of different widths.
    """
    capturing = [rank for rank in ranks if rank["captures"]]
    held = [rank["first_layer"] + index for rank in capturing for index in range(rank["num_layers"])]
    if sorted(held) != list(range(num_layers)):
        stages = ", ".join(f"rank {rank['rank']}: {_layers_of(rank)}" for rank in capturing) or "none"
        raise UntappedLayersError(
            f"The ranks that capture must hold each of the model's {num_layers} layers once, but they hold {stages}. "
            "This is a defect of residuum: please report it, with the engine's parallel sizes."
        )
    widths = {tuple(rank["site_widths"]) for rank in ranks}
    if len(widths) > 1:
        raise UntappedLayersError(
            f"Rows at the same site must have the same width in all pipeline stages, and have {sorted(widths)} "
            "elements at the sites of --capture-sites. Use one stage, or leave out the sites that differ."
        )
    away = [str(rank["rank"]) for rank in capturing if not os.path.exists(rank["control_path"])]  # noqa: PTH110
    if away:
        raise UntappedLayersError(
            f"Ranks {', '.join(away)} run on another machine, where no shipper of this service reaches their rows. Run "
            "all pipeline stages on the machine of the service."
        )


def _of_replica(index: int, replicas: Sequence[object]) -> str:
    """Return what names a replica in front of a message; nothing if there is only one."""
    return f"replica {index}: " if len(replicas) > 1 else ""


def _layers_of(rank: dict[str, Any]) -> str:
    return f"{rank['first_layer']}–{rank['first_layer'] + rank['num_layers'] - 1}"
