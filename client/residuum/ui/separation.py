"""How well directions separate two sets of examples, measured on examples that were held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from residuum.values.captures.activations import Activations

_FOLDS = 5

Float64Array = npt.NDArray[np.float64]


def separations(
    positive: Sequence[Activations], negative: Sequence[Activations], layers: Sequence[int]
) -> dict[str, Any] | None:
    """Return for each layer how well a difference of means separates examples that it was not made from.

    The examples are split into folds. Each fold is projected onto the direction that the other folds give. The result
    is the probability that a positive example projects further than a negative one: 1 separates completely, 0.5 is
    chance (the area under the ROC curve).

    Args:
        positive: One capture for each positive example; the example is the mean of its rows.
        negative: The same for the negative examples.
        layers: The layers.

    Returns:
        The layers and their areas; None with fewer than two examples of a kind, because nothing can be held out.
    """
    if min(len(positive), len(negative)) < 2:  # noqa: PLR2004 - one to learn from, one held out
        return None
    areas = [_area(_examples(positive, layer), _examples(negative, layer)) for layer in layers]
    return {"layers": list(layers), "areas": areas}


def _examples(captures: Sequence[Activations], layer: int) -> Float64Array:
    return np.stack([acts[layer].mean(axis=0, dtype=np.float64) for acts in captures])


def _area(positive: Float64Array, negative: Float64Array) -> float:
    folds = min(_FOLDS, len(positive), len(negative))
    areas = []
    for fold in range(folds):
        held = [np.arange(len(side)) % folds == fold for side in (positive, negative)]
        direction = positive[~held[0]].mean(axis=0) - negative[~held[1]].mean(axis=0)
        high, low = positive[held[0]] @ direction, negative[held[1]] @ direction
        wins = np.sign(high[:, None] - low[None, :])
        areas.append((wins.mean() + 1) / 2)
    return float(np.mean(areas))
