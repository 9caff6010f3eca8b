"""Whether the ranks of an engine capture the whole model between them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class UntappedLayersError(RuntimeError):
    """The ranks do not capture the whole model. The message says what each has."""


def check_ranks(ranks: Sequence[dict[str, Any]], num_layers: int) -> None:
    """Make sure that the ranks which capture have every layer between them, each once, and that shippers reach them.

    Args:
        ranks: What each rank says of itself; see `TappedWorker.residuum_describe`.
        num_layers: Decoder layers of the whole model.

    Raises:
        UntappedLayersError: A layer would never be captured, or twice, or by a rank of another machine.
    """
    capturing = [rank for rank in ranks if rank["captures"]]
    held = [rank["first_layer"] + index for rank in capturing for index in range(rank["num_layers"])]
    if sorted(held) != list(range(num_layers)):
        stages = ", ".join(f"rank {rank['rank']}: {_layers_of(rank)}" for rank in capturing) or "none"
        raise UntappedLayersError(
            f"the ranks that capture must have {num_layers} layers between them, each once; they have {stages}"
        )
    away = [str(rank["rank"]) for rank in capturing if not os.path.exists(rank["control_path"])]  # noqa: PTH110
    if away:
        raise UntappedLayersError(
            f"ranks {', '.join(away)} run on another machine than this service, where no shipper reaches their rows; "
            "run all pipeline stages on one machine"
        )


def _layers_of(rank: dict[str, Any]) -> str:
    return f"{rank['first_layer']}–{rank['first_layer'] + rank['num_layers'] - 1}"
