"""Attention weights, computed from captured queries and keys."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from residuum.exceptions import InvalidRequest
from residuum.v1 import inference_pb2
from residuum.values.captures.activations import Activations

if TYPE_CHECKING:
    from residuum.values.model.info import ModelInfo

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AttentionLayer:
    """What determines a layer's attention weights, besides its queries and keys.

    Attributes:
        num_heads: Query heads; 0 if the server does not know the attention, and then all else is unset.
        num_kv_heads: Key-value heads. Each serves `num_heads / num_kv_heads` query heads, one after the other.
        scale: The factor of the inner products of queries and keys.
        sliding_window: A position attends to itself and to the `sliding_window - 1` positions before it; 0: to all.
        logits_soft_cap: c, if scores s become c·tanh(s / c); 0 if not.
        sinks: A further logit of each head, which takes part in the softmax and has no key; empty: none.
        alibi_slopes: The slope of each head, if distances are added to the scores (ALiBi); empty: none.
    """

    num_heads: int
    num_kv_heads: int = 0
    scale: float = 0.0
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    sinks: tuple[float, ...] = ()
    alibi_slopes: tuple[float, ...] = ()

    def weights(self, queries: Rows, keys: Rows, positions: Sequence[int], heads: Sequence[int]) -> Rows:
        """Return attention weights.

        Args:
            queries: float32 [queries, num_heads × head size], as the site "q" has them.
            keys: float32 [keys, num_kv_heads × head size], as the site "k" has them, of all positions from 0 on.
            positions: The position of each query.
            heads: The query heads to compute.

        Returns:
            float32 [heads, queries, keys]. A weight of a later position is 0. With sinks, a row's sum is below 1.
        """
        places, chosen = np.asarray(positions), np.asarray(heads)
        q = queries.reshape(len(queries), self.num_heads, -1)[:, chosen]
        k = keys.reshape(len(keys), self.num_kv_heads, -1)[:, chosen * self.num_kv_heads // self.num_heads]
        scores = np.float32(self.scale) * np.einsum("qhd,khd->hqk", q, k, optimize=True)
        if self.logits_soft_cap:
            scores = self.logits_soft_cap * np.tanh(scores / self.logits_soft_cap)
        distances = np.arange(len(keys)) - places[:, None]
        if self.alibi_slopes:
            scores += np.array(self.alibi_slopes, np.float32)[chosen, None, None] * distances
        is_seen = distances <= 0
        if self.sliding_window:
            is_seen &= distances > -self.sliding_window
        scores = np.where(is_seen, scores, -np.inf)
        largest = scores.max(axis=-1, keepdims=True)
        sinks = np.array(self.sinks, np.float32)[chosen, None, None] if self.sinks else np.float32(-np.inf)
        largest = np.maximum(largest, sinks)
        exponentials = np.exp(scores - largest)
        weights: Rows = exponentials / (exponentials.sum(axis=-1, keepdims=True) + np.exp(sinks - largest))
        return weights

    @classmethod
    def from_proto(cls, proto: inference_pb2.AttentionLayer) -> AttentionLayer:
        """Return the value of a message."""
        fields = {field.name: getattr(proto, field.name) for field in proto.DESCRIPTOR.fields}
        return cls(**{**fields, "sinks": tuple(proto.sinks), "alibi_slopes": tuple(proto.alibi_slopes)})


def attention_weights(
    acts: Activations,
    layer: int,
    info: ModelInfo,
    *,
    heads: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
) -> Rows:
    """Return the attention weights of a layer, from its captured queries and keys.

    They are computed here, from rows that the model computed, with the model's scale, sliding window, soft cap, sinks
    and ALiBi slopes. This takes several arrays of heads × positions × keys × 4 bytes.

    Args:
        acts: Activations with the sites "q" and "k", and "k" at all positions from 0 to the last of `positions`.
        layer: The layer.
        info: The model: `client.info()`.
        heads: The query heads; by default all.
        positions: The positions of the queries; by default all that were captured.

    Returns:
        float32 [heads, positions, keys]. Key j is the token at position j; a later one than the query has weight 0. A
        row sums up to 1, or less if the layer has sinks. It differs from the model's own by the rounding of q and k.

    Raises:
        InvalidRequest: Rows or heads are missing, or the weights of this layer do not follow from its queries and keys.

    Example:
        >>> capture = residuum.Capture(layers=[12], sites=["q", "k"])
        >>> acts = client.activations(client.generate("The cat sat on the mat", max_tokens=1, capture=capture))
        >>> residuum.attention_weights(acts, 12, client.info(), heads=[3])[0, -1].argmax()
        0
    """
    attention = info.attention[layer] if layer < len(info.attention) else AttentionLayer(0)
    if not attention.num_heads:
        raise _invalid(f"the server does not describe the attention of layer {layer}, or it is of another kind.")
    chosen = range(attention.num_heads) if heads is None else [operator.index(head) for head in heads]
    wrong = [head for head in chosen if not 0 <= head < attention.num_heads]
    if wrong:
        raise _invalid(f"there is no head {wrong[0]}: layer {layer} has {attention.num_heads}, from 0 on.")
    if not {"q", "k"} <= set(acts.sites):
        raise _invalid(f"the activations have the sites {', '.join(acts.sites)}. Capture and read both q and k.")
    queries, keys = acts.select(site="q"), acts.select(site="k")
    wanted = queries.positions.tolist() if positions is None else [operator.index(position) for position in positions]
    if not wanted:
        raise _invalid("no position of a query is chosen. Capture q and k at one position at least.")
    return attention.weights(
        _rows(queries, layer, wanted), _rows(keys, layer, range(max(wanted, default=-1) + 1)), wanted, chosen
    )


def _rows(acts: Activations, layer: int, positions: Sequence[int]) -> Rows:
    """Return the rows of a layer at some positions, float32 [positions, width]."""
    if layer not in acts:
        raise _invalid(f"{acts.manifest.capture_id} has no rows of layer {layer}.")
    places = {int(position): index for index, position in enumerate(acts.positions)}
    present = acts.present[acts.layers.index(layer)]
    missing = [position for position in positions if position not in places or not present[places[position]]]
    if missing:
        more = f" and of {len(missing) - 1} others" if len(missing) > 1 else ""
        raise _invalid(
            f"{acts.manifest.capture_id} has no {acts.site} of position {missing[0]}{more}. Capture q at the queries' "
            "positions, and k at all positions up to the last of them."
        )
    if not acts.manifest.format_at(acts.site).decodes_to_rows:
        raise _invalid(f"{acts.manifest.capture_id} has no rows of {acts.site}, but their encoding {acts.encoding}.")
    rows: Rows = np.asarray(acts[layer], np.float32)[[places[position] for position in positions]]
    return rows


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"attention_weights: {problem}", reason="INVALID_FIELD")
