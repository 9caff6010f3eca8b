"""Tap points: the places in the graph where the op is called, and the sites that each point sees.

Between two layers, one point sees two sites: `resid_post` of a layer is `resid_pre` of the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from residuum.v1 import capture_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

Site = capture_pb2.Site

ENTRY = 0
"""The point before the first layer of this pipeline stage."""

INNER_SITES = (
    capture_pb2.SITE_ATTN_OUT,
    capture_pb2.SITE_MLP_OUT,
    capture_pb2.SITE_ATTN_IN,
    capture_pb2.SITE_RESID_MID,
    capture_pb2.SITE_MLP_IN,
)
"""The sites inside a layer whose rows are as wide as the residual stream."""

WIDE_SITES = (
    capture_pb2.SITE_Q,
    capture_pb2.SITE_K,
    capture_pb2.SITE_V,
    capture_pb2.SITE_Z,
    capture_pb2.SITE_MLP_ACT,
    capture_pb2.SITE_ROUTER_LOGITS,
    capture_pb2.SITE_ROUTING_WEIGHTS,
    capture_pb2.SITE_Q_PRE,
    capture_pb2.SITE_K_PRE,
)
"""The sites inside a layer whose rows have a width of their own."""

FINAL_NORM = capture_pb2.SITE_FINAL_NORM
"""The site after the final norm. Only the last layer of the model has it."""

STEERABLE = frozenset(
    {
        capture_pb2.SITE_RESID_POST,
        capture_pb2.SITE_ATTN_OUT,
        capture_pb2.SITE_MLP_OUT,
        capture_pb2.SITE_RESID_MID,
        capture_pb2.SITE_Z,
        capture_pb2.SITE_MLP_ACT,
    }
)
"""The sites at which rows can be steered: what the model reads after the tap is exactly the row that the tap changes.

The rows at q, k and v reach the attention's kernel together with the KV cache, which holds rows of earlier steps. Those
at attn_in and mlp_in may be one tensor, so a change of one would change the other.
"""


class RowShape(NamedTuple):
    """The elements of a row, and how the ranks of a tensor-parallel group share them."""

    width: int
    """The elements that this rank has."""
    ranks: int = 1
    """How many ranks have a part of each row, in the order of their elements. 1: every rank has whole rows."""
    copies: int = 1
    """How many neighbouring ranks have the same part: a model can have fewer heads than there are ranks."""

    @property
    def whole(self) -> int:
        """The elements of a whole row."""
        return self.width * self.ranks // self.copies

    @property
    def is_divided(self) -> bool:
        """Whether this rank has only a part of each row."""
        return self.ranks > 1


@dataclass(frozen=True)
class TapPoints:
    """The points of one pipeline stage: the entry, one after each layer, then one in each layer for each inner site.

    The last point is after the final norm; only the last stage has an op there. The rows at all points have the same
    shape. Points of another shape than the stream's also number the entry, the places after layers and the last one,
    but have no op there.
    """

    first_layer: int
    num_layers: int
    inner: tuple[Site.ValueType, ...] = INNER_SITES
    """The sites inside a layer."""
    is_divided: bool = False
    """Whether this rank has only a part of each row. Such rows cannot be steered."""

    @property
    def has_stream(self) -> bool:
        """Whether the points see the residual stream."""
        return self.inner is INNER_SITES

    @property
    def can_steer(self) -> bool:
        """Whether rows can be steered at some of the points."""
        return self.has_stream or not (self.is_divided or STEERABLE.isdisjoint(self.inner))

    def sees(self, site: Site.ValueType) -> bool:
        """Return whether a point sees this site."""
        return site in self.inner or (self.has_stream and site not in WIDE_SITES)

    @property
    def count(self) -> int:
        """How many points there are, including those without an op."""
        return self._final + 1

    @property
    def _final(self) -> int:
        """The point after the final norm."""
        return 1 + (1 + len(self.inner)) * self.num_layers

    @property
    def layers(self) -> range:
        """The stage's layers."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def own(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Return those of `layers` that belong to this stage."""
        stage = self.layers
        return tuple(layer for layer in layers if layer in stage)

    def after(self, layer: int) -> int:
        """Return the point after a layer."""
        return 1 + layer - self.first_layer

    def of(self, site: Site.ValueType, layer: int) -> int:
        """Return the point that sees a site of a layer of this stage."""
        index = layer - self.first_layer
        if site in self.inner:
            return 1 + (1 + self.inner.index(site)) * self.num_layers + index
        outer = {capture_pb2.SITE_RESID_PRE: index, capture_pb2.SITE_RESID_POST: index + 1, FINAL_NORM: self._final}
        return outer[site]

    def sites(self, point: int) -> tuple[tuple[Site.ValueType, int], ...]:
        """Return the (site, layer) pairs that a point sees. A pair may name a layer of a neighbouring stage."""
        index, layers = point - 1, self.num_layers
        if index < layers:
            layer = self.first_layer + index
            return (capture_pb2.SITE_RESID_POST, layer), (capture_pb2.SITE_RESID_PRE, layer + 1)
        if point == self._final:
            return ((FINAL_NORM, self.layers[-1]),)
        return ((self.inner[index // layers - 1], self.first_layer + index % layers),)


@dataclass(frozen=True)
class AllPoints:
    """The points of all shapes of rows in a stage. They are numbered one shape after the other."""

    groups: tuple[TapPoints, ...]
    """The points of each shape; the first ones see the residual stream."""
    firsts: tuple[int, ...] = field(init=False)
    """The number of the first point of each group."""

    def __post_init__(self) -> None:
        counts = [group.count for group in self.groups]
        object.__setattr__(self, "firsts", tuple(sum(counts[:index]) for index in range(len(counts))))

    def after(self, layer: int) -> int:
        """Return the number of the point after a layer."""
        return self.groups[0].after(layer)

    def of(self, site: Site.ValueType, layer: int) -> int:
        """Return the number of the point that sees a site of a layer of this stage."""
        group = next(index for index, points in enumerate(self.groups) if points.sees(site))
        return self.firsts[group] + self.groups[group].of(site, layer)
