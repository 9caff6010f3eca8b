"""Directions from two sets of examples. What is read, and why, is told by `residuum.directions`."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from residuum.directions.examples import DEFAULT_POSITIONS, ExampleReader, ExampleSet, Float64Array, no_examples, paired
from residuum.directions.values import Directions, Origin
from residuum.exceptions import BadVector, InvalidRequest
from residuum.values.selections import LayersLike, PositionsLike


def difference_of_means(
    positive: ExampleSet,
    negative: ExampleSet,
    *,
    layers: LayersLike | None = None,
    positions: PositionsLike = DEFAULT_POSITIONS,
    allow_partial: bool = False,
) -> Directions:
    """Return the mean of the positive examples minus that of the negative ones, in each layer.

    The plainest direction, and often the best for steering (Marks & Tegmark, arXiv:2310.06824, §5; Rimsky et al.,
    arXiv:2312.06681, who take it at the last token of prompts that differ in it; Chen et al., arXiv:2507.21509, who
    take it over the tokens of replies: `positions="generated"`). It keeps its length: `scale=1` goes the whole way
    from one mean to the other. `.normalized()` makes that 1.

    **An example** is one capture: the mean of its rows at the chosen positions, so that a long one counts no more than
    a short one. Of a plain mapping, each row is an example. The sets may differ in size, and neither is kept: sums are
    float64, and a generator that reads one capture after the other needs the room of one.

    Of Activations the selected sequence and site count; give `acts.select(sequence=1)` beside `acts` to have both.

    Args:
        positive: What the direction leads to: Activations, or a mapping layer -> [rows, hidden], or an iterable of
            either.
        negative: What it leads away from; likewise.
        layers: Only these layers; None or "all" means those of the examples, which must then all have the same.
        positions: The rows of a capture that count, see `Positions.of`; None for all that there are. By default the
            last prompt token's, where the model has read everything and not yet answered. The first token's rows are
            better left out: in many models they are far longer than all others, whatever the text.
        allow_partial: Take captures that are not complete. Rows that are missing are left out.

    Returns:
        Directions whose origin says of what they were made.

    Raises:
        InvalidRequest: A set is empty; or captures differ in layers (UnknownLayer), hidden size (BadVector), model,
            site or steering, or lack rows at `positions`. Also for steered captures of which some were taken before
            and some after steering.
        CaptureNotComplete: A capture is not complete, and `allow_partial` is false.
        BadVector: An example has NaN or infinite elements, or is no array [rows, hidden].

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
    """Return the first principal component of paired examples, in each layer: length 1, positive examples lie higher.

    Example i of one set is paired with example i of the other: prompts that differ in nothing but what the direction is
    to mean. This is the reading of Zou et al. (arXiv:2310.01405, §3.1), in the two forms that repeng has:

    * "pca_center": both rows of a pair are centred on their middle. That is the component of the differences
      themselves, about 0: what the differences have in common counts.
    * "pca_diff": the differences are centred on their mean, as repeng's default does through scikit-learn. What all
      differences share is taken away, and what is found is along which line they *vary*. If they hardly vary, that can
      be far from where they point.

    The sign is such that in most pairs the positive example lies higher, as in repeng.

    Room for pairs × layers × hidden × 4 bytes is needed; read fewer `layers` at a time if that is too much. The work
    grows with the third power of the smaller of pairs and hidden size.

    Args:
        positive: What the direction leads to; as for `difference_of_means`.
        negative: What it leads away from, pair by pair.
        method: What is centred on what.
        layers: As for `difference_of_means`.
        positions: As for `difference_of_means`.
        allow_partial: Take captures that are not complete. Where a row is missing, its pair is left out.

    Raises:
        InvalidRequest: As for `difference_of_means`; or the sets are not of one size, there are too few pairs, or in
            some layer nothing varies.
        CaptureNotComplete: A capture is not complete, and `allow_partial` is false.
        BadVector: An example has NaN or infinite elements, or is no array [rows, hidden]; or a difference is beyond
            float32.

    Example:
        >>> residuum.directions.pca(map(client.activations, honest), map(client.activations, lying))[15].norm
        1.0
    """
    if method not in ("pca_center", "pca_diff"):
        raise InvalidRequest(f"method={method!r} is not known; write 'pca_center' or 'pca_diff'.")
    reader = ExampleReader(layers, positions, allow_partial=allow_partial)
    differences: list[npt.NDArray[np.float32]] = []
    present: list[npt.NDArray[np.bool_]] = []
    for above, below in paired(reader.batches("positive", positive), reader.batches("negative", negative)):
        with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused by name
            differences.append((above.values - below.values).astype(np.float32))
        present.append(above.present & below.present)
    vectors = {}
    for index, layer in enumerate(reader.layers):
        rows = np.concatenate(
            [batch[there[:, index], index] for batch, there in zip(differences, present, strict=True)]
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
        raise InvalidRequest(f"{side}: not one capture has the rows of the layers {bare}.", reason="INVALID_FIELD")
    return total / counts[:, None], number


def _component(layer: int, differences: Float64Array, *, centred: bool) -> Float64Array:
    """Return the first principal component of differences [pairs, hidden], as a unit vector."""
    least = 2 if centred else 1
    if len(differences) < least:
        raise InvalidRequest(
            f"Layer {layer}: {len(differences)} pairs of rows, and at least {least} are needed.", reason="INVALID_FIELD"
        )
    rows = differences - differences.mean(axis=0) if centred else differences
    length = np.linalg.norm(rows)
    if not np.isfinite(length):
        raise BadVector(f"Layer {layer}: examples differ by more than a float32 can hold.", reason="BAD_VALUES")
    # Below this it is what float32 makes of numbers that are the same, and points anywhere.
    if length <= 1e-6 * np.linalg.norm(differences):
        why = "all differences are the same; use method='pca_center'" if differences.any() else "the sets are the same"
        raise InvalidRequest(f"Layer {layer}: no component, because {why}.", reason="INVALID_FIELD")
    rows = rows / length  # so that no square overflows or vanishes
    component: Float64Array
    if len(rows) <= rows.shape[1]:  # whichever of the two products of the matrix with itself is the smaller
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
