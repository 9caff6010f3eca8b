"""What random requests are drawn from: the served model's sites, and vectors for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import residuum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.conformance.reference import Reference

VECTORS = 6
"""The vectors of each site: few, so that requests share them."""
FEATURES = 48
"""The features of the sparse autoencoder."""


@dataclass(frozen=True)
class StoredPrompt:
    """A capture whose rows other requests take for their steering."""

    capture_id: str
    positions: int
    rows: Mapping[str, Mapping[int, np.ndarray]]
    """The rows that the service stored, by site and layer, [positions, width]."""


@dataclass
class World:
    """The served model and what requests may use."""

    info: residuum.ModelInfo
    sites: tuple[str, ...]
    layers: dict[str, tuple[int, ...]]
    """The layers that have a site."""
    scales: dict[str, float]
    """The usual size of an element of a row at a site."""
    vectors: dict[str, list[residuum.Vector]]
    sae: residuum.SAE
    adapters: tuple[str, ...] = ()
    stored: StoredPrompt | None = None
    top_experts: int = 0
    """How many experts a router chooses; 0 without experts."""
    tokens: int = 512
    """Token IDs are below this."""
    longest: int = 250
    """The most tokens of prompt and reply together."""
    steerable: tuple[str, ...] = field(default=())

    def width(self, site: str) -> int:
        """Return the elements of a row."""
        return int(self.info.site_widths.get(site, self.info.hidden_size))


def make_world(
    info: residuum.ModelInfo, reference: Reference, sites: tuple[str, ...], seed: int, top_experts: int = 0
) -> World:
    """Return what the requests to a service are drawn from.

    Args:
        info: The service's description of its model.
        reference: The same model, which says how large rows are.
        sites: The sites that are compared.
        seed: The seed of the vectors.
        top_experts: How many experts a router chooses; 0 without experts.
    """
    rng = np.random.default_rng([seed, 1])
    tokens = [int(token) for token in rng.integers(3, 512, size=60)]
    rows = reference.rows(tokens)
    every = tuple(range(info.num_layers))
    scales = {site: float(np.sqrt(np.nanmean(rows[site] ** 2))) for site in sites}
    widths = {site: int(info.site_widths.get(site, info.hidden_size)) for site in sites}
    vectors = {
        site: [
            residuum.Vector.from_array((0.5 * scales[site] * rng.standard_normal(widths[site])).astype(np.float32))
            for _ in range(VECTORS)
        ]
        for site in sites
    }
    shape = (FEATURES, info.hidden_size)
    encoder = rng.standard_normal(shape) / (scales["resid_post"] * np.sqrt(info.hidden_size))
    decoder = 0.3 * scales["resid_post"] * rng.standard_normal(shape)
    sae = residuum.SAE(
        encoder.astype(np.float32), decoder.astype(np.float32), encoder_bias=0.3 * rng.standard_normal(FEATURES)
    )
    return World(
        info=info,
        sites=sites,
        layers={site: tuple(info.site_layers.get(site, every)) for site in sites},
        scales=scales,
        vectors=vectors,
        sae=sae,
        adapters=info.adapters,
        top_experts=top_experts,
        steerable=tuple(site for site in info.steering_sites if site in sites),
    )
