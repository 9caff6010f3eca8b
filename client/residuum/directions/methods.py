"""Methods that compute directions from two sets of examples. `residuum.directions` lists their sources."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from residuum.directions.examples import DEFAULT_POSITIONS, ExampleReader, ExampleSet, Float64Array, no_examples, paired
from residuum.directions.values import Directions, Origin
from residuum.exceptions import BadVector, InvalidRequest
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike


def difference_of_means(
    positive: ExampleSet,
    negative: ExampleSet,
    *,
    layers: LayersLike | None = None,
    positions: PositionsLike = DEFAULT_POSITIONS,
    allow_partial: bool = False,
) -> Directions:
    """Return the mean of the positive examples minus the mean of the negative examples, for each layer.

    This is the simplest direction, and often the best for steering (Marks & Tegmark, arXiv:2310.06824, §5). Rimsky et
    al. (arXiv:2312.06681) take it at the last token of prompts that differ in that token. Chen et al.
    (arXiv:2507.21509) take it over the tokens of replies, as with `positions="generated"`. The direction keeps its
    length, so `scale=1` moves one mean to the other. `.normalized()` gives it length 1.

    **An example** is one capture: the mean of its rows at the chosen positions. So long and short captures have the
    same weight. In a plain mapping, each row is an example. The sets may differ in size. Sums are float64. No example
    is kept, so a generator that reads captures one by one needs memory for only one.

    For Activations, the selected sequence and site are used. To use two sequences, pass `acts` and
    `acts.select(sequence=1)`.

    Args:
        positive: The examples that the direction points to: Activations, or a mapping layer -> [rows, hidden], or an
            iterable of either.
        negative: The examples that the direction points away from, in the same forms.
        layers: Use only these layers. None or "all" means the layers of the examples, which must then be the same.
        positions: The rows of a capture to use, see `Positions.of`; None for all. By default that of the last prompt
            token, where the model has read everything and not yet answered. Leave out the first token's row: in many
            models, its norm is far greater than that of all others, for every text.
        allow_partial: Use captures that are not complete, without their missing rows.

    Returns:
        Directions whose origin describes the examples.

    Raises:
        InvalidRequest: A set is empty; or captures differ in layers (UnknownLayer), hidden size (BadVector), model,
            site or steering, or lack rows at `positions`; or some were captured before and some after steering.
        CaptureNotComplete: A capture is not complete, and `allow_partial` is false.
        BadVector: An example has NaN or infinite elements, or is not an array [rows, hidden].

    Example:
        >>> happy = (client.activations(reply) for reply in happy_replies)
        >>> sad = (client.activations(reply) for reply in sad_replies)
        >>> residuum.directions.difference_of_means(happy, sad, layers=range(8, 20))
        Directions(12 layers × 576, difference_of_means of 8 + 8 examples, resid_post of 'SmolLM2-135M-Instruct')
    """
    reader = ExampleReader(layers, positions, allow_partial=allow_partial)
    above, positive_examples = _mean(reader, "positive", positive)
    below, negative_examples = _mean(reader, "negative", negative)
    origin = _origin(reader, "difference_of_means", positive_examples, negative_examples)
    return Directions(dict(zip(reader.layers, above - below, strict=True)), origin=origin)


def pca(
    positive: ExampleSet,
    negative: ExampleSet,
    *,
    method: Literal["pca_center", "pca_diff"] = "pca_center",
    layers: LayersLike | None = None,
    positions: PositionsLike = DEFAULT_POSITIONS,
    allow_partial: bool = False,
) -> Directions:
    """Return the first principal component of paired examples for each layer, as a vector of length 1.

    Example i of one set is paired with example i of the other. Use pairs of prompts that differ only in what the
    direction should mean. This is the method of Zou et al. (arXiv:2310.01405, §3.1), in the two forms of repeng:

    * "pca_center" centres both rows of a pair on their midpoint. This gives the component of the differences
      themselves, so what the differences have in common counts.
    * "pca_diff" centres the differences on their mean, as repeng's default does through scikit-learn. This removes what
      all differences share, and finds the line along which they *vary*. If they hardly vary, that line can be far from
      the direction in which they point.

    The sign is chosen so that in most pairs the positive example has the higher projection, as in repeng.

    This needs memory for pairs × layers × hidden × 4 bytes; read fewer `layers` at a time if that is too much. The time
    grows with the cube of the number of pairs or of the hidden size, whichever is smaller.

    Args:
        positive: The examples that the direction points to; as for `difference_of_means`.
        negative: The examples that the direction points away from, in the same order.
        method: How the pairs are centred.
        layers: As for `difference_of_means`.
        positions: As for `difference_of_means`.
        allow_partial: Use captures that are not complete. Each layer leaves out the pairs that lack a row.

    Raises:
        InvalidRequest: As for `difference_of_means`; or the sets differ in size, there are too few pairs, or nothing
            varies in a layer.
        CaptureNotComplete: A capture is not complete, and `allow_partial` is false.
        BadVector: An example has NaN or infinite elements, or is not an array [rows, hidden]; or a difference is beyond
            float32.

    Example:
        >>> residuum.directions.pca(map(client.activations, honest), map(client.activations, lying))[15].norm
        1.0
    """
    if method not in ("pca_center", "pca_diff"):
        raise InvalidRequest(f"method={method!r} is unknown; use 'pca_center' or 'pca_diff'.")
    reader = ExampleReader(layers, positions, allow_partial=allow_partial)
    differences: list[npt.NDArray[np.float32]] = []
    present: list[npt.NDArray[np.bool_]] = []
    for above, below in paired(reader.batches("positive", positive), reader.batches("negative", negative)):
        with np.errstate(over="ignore"):  # overflow gives infinity, which _component refuses
            differences.append((above.values - below.values).astype(np.float32))
        present.append(above.present & below.present)
    vectors = {}
    for index, layer in enumerate(reader.layers):
        rows = np.concatenate(
            [batch[rows_present[:, index], index] for batch, rows_present in zip(differences, present, strict=True)]
        )
        vectors[layer] = _component(layer, rows.astype(np.float64), centred=method == "pca_diff")
    pairs = sum(len(batch) for batch in differences)
    return Directions(vectors, origin=_origin(reader, method, pairs, pairs))


def _mean(reader: ExampleReader, side: str, examples: ExampleSet) -> tuple[Float64Array, int]:
    """Return the mean of a set, [layers, hidden], and the number of its examples."""
    total: Float64Array | None = None
    counts = np.zeros(0, dtype=np.int64)
    number = 0
    for batch in reader.batches(side, examples):
        if total is None:
            total, counts = np.zeros(batch.values.shape[1:]), np.zeros(batch.values.shape[1], dtype=np.int64)
        total += batch.values.sum(axis=0)
        counts += batch.present.sum(axis=0)
        number += len(batch)
    if total is None:
        raise no_examples(side)
    if not counts.all():
        bare = [layer for layer, count in zip(reader.layers, counts, strict=True) if not count]
        raise InvalidRequest(
            f"{side}: no capture has rows of the layers {bare}. Leave them out with layers=.", reason="INVALID_FIELD"
        )
    return total / counts[:, None], number


def _component(layer: int, differences: Float64Array, *, centred: bool) -> Float64Array:
    """Return the first principal component of differences [pairs, hidden], as a unit vector."""
    least = 2 if centred else 1
    if len(differences) < least:
        raise InvalidRequest(
            f"Layer {layer} has {len(differences)} pairs of rows, but at least {least} are needed.",
            reason="INVALID_FIELD",
        )
    rows = differences - differences.mean(axis=0) if centred else differences
    length = np.linalg.norm(rows)
    if not np.isfinite(length):
        raise BadVector(f"Layer {layer}: the examples differ by more than float32 can hold.", reason="BAD_VALUES")
    # Below this threshold the differences are only float32 rounding errors, which have no meaningful direction.
    if length <= 1e-6 * np.linalg.norm(differences):
        why = "all differences are the same; use method='pca_center'" if differences.any() else "the sets are the same"
        raise InvalidRequest(f"Layer {layer} has no principal component: {why}.", reason="INVALID_FIELD")
    rows = rows / length  # so that no square overflows or underflows
    component: Float64Array
    if len(rows) <= rows.shape[1]:  # decompose the smaller of the two Gram matrices
        component = rows.T @ np.linalg.eigh(rows @ rows.T)[1][:, -1]
    else:
        component = np.linalg.eigh(rows.T @ rows)[1][:, -1]
    component /= np.linalg.norm(component)
    heights = differences @ component
    balance = np.sign(heights).sum() or heights.sum()
    return component if balance >= 0 else -component


def _origin(reader: ExampleReader, method: str, positive: int, negative: int) -> Origin:
    return Origin(
        method=method,
        model=reader.model,
        site=reader.site,
        positions=reader.positions,
        positive_examples=positive,
        negative_examples=negative,
        steered=reader.steered,
    )
