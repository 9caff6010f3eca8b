"""Sites, and points: a site and its layers, such as "resid_post.12" or "mlp_act.3-5".

Names of TransformerLens and of interp-engine are accepted where they mean exactly the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from residuum.exceptions import InvalidRequest, UnknownSite
from residuum.v1 import capture_pb2
from residuum.values.selections.layers_and_positions import layer_list
from residuum.wire.selection import to_ranges

SITES = {name.removeprefix("SITE_").lower(): site for name, site in capture_pb2.Site.items() if site}
"""The capture sites by name."""

SITE_NAMES = {number: name for name, number in SITES.items()}

BESIDE_THE_STREAM = frozenset({"q", "k", "v", "q_pre", "k_pre", "z", "mlp_act", "router_logits", "routing_weights"})
"""Sites whose rows are of another kind than the residual stream, even if they are as wide."""

Point = tuple[str, tuple[int, ...] | None]
"""A site and its layers; None for all layers."""

_OF_TRANSFORMER_LENS = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "attn.hook_in": "attn_in",
    "attn.hook_q": "q_pre",
    "attn.hook_k": "k_pre",
    "attn.hook_rot_q": "q",
    "attn.hook_rot_k": "k",
    "attn.hook_v": "v",
    "attn.hook_z": "z",
    "hook_attn_out": "attn_out",
    "mlp.hook_in": "mlp_in",
    "mlp.hook_post": "mlp_act",
    "hook_mlp_out": "mlp_out",
}
"""The part of a TransformerLens name after "blocks.N.", and the site with the same rows."""

_OF_INTERP_ENGINE = {
    "value": "v",
    "q_norm_in": "q_pre",
    "k_norm_in": "k_pre",
    "attn_out_post": "attn_out",
    "mlp_out_post": "mlp_out",
}
"""The names of interp-engine that differ from ours, and the site with the same rows."""

_OTHERS = {
    "attn.hook_out": 'the output before a norm that some models apply to it; "attn_out" has what the attention adds',
    "mlp.hook_out": 'the output before a norm that some models apply to it; "mlp_out" has what the MLP adds',
    "hook_attn_in": 'the stream before the norm; "attn_in" has what the attention takes, and "resid_pre" the stream',
    "hook_mlp_in": 'the stream before the norm; "mlp_in" has what the MLP takes, and "resid_mid" the stream',
    "ln1.hook_normalized": 'the rows before they are multiplied with the norm\'s weight; "attn_in" has them after it',
    "ln2.hook_normalized": 'the rows before they are multiplied with the norm\'s weight; "mlp_in" has them after it',
    "attn.hook_pattern": "attention weights; residuum.attention_weights computes them from q and k",
    "attn.hook_attn_scores": "attention scores; residuum.attention_weights computes the weights from q and k",
}
"""Names of TransformerLens whose rows no site has, and what they are."""

_OTHERS_AFTER_LAYERS = {
    "ln_final.hook_normalized": 'the rows before they are multiplied with the final norm\'s weight; "final_norm" has '
    "them after it",
    "ln_final.hook_scale": 'the lengths by which the final norm divides; "final_norm" has its rows',
}
"""The same, after the last layer."""

EMBEDDINGS = "embeddings"
"""Another name of resid_pre.0: what enters the first layer, with embeddings of positions if the model adds them."""

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def site_list(sites: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of sites that a user gives as a list, or as one string separated by commas."""
    if not isinstance(sites, Iterable):
        raise TypeError(f"sites= takes a list of names, or one string separated by commas, not {sites!r}.")
    return tuple(name.strip() for name in sites.split(",")) if isinstance(sites, str) else tuple(sites)


def site_numbers(sites: str | Sequence[str]) -> list[capture_pb2.Site.ValueType]:
    """Return the contract's numbers of sites, in the order of their names.

    Raises:
        UnknownSite: A site does not exist.
        InvalidRequest: A site is named twice, or none is named.
    """
    names = site_list(sites)
    for name in names:
        if name not in SITES:
            raise UnknownSite(f"{name!r} is not a site; {_site_advice(name)}.", reason="UNKNOWN_SITE")
    if not names or len(set(names)) != len(names):
        raise InvalidRequest("Name at least one site, and each site once.", reason="INVALID_FIELD")
    return [SITES[name] for name in names]


def _site_advice(name: str) -> str:
    if name == "all":  # valid for layers; only the server knows all its sites
        return "use sites=client.info().sites for all sites that the server was started with"
    return f"choose among {', '.join(SITES)}"


def parse_points(points: str | Iterable[str]) -> dict[str, tuple[int, ...] | None]:
    """Return the layers at each site, in the order in which the sites are named first; None for all layers.

    Args:
        points: Points, or one text with points separated by commas. Points of one site add up.

    Raises:
        InvalidRequest: No point is named, or a point has another form.
        UnknownSite: A point names no site.
        TypeError: A point is no text.
    """
    if not isinstance(points, Iterable):
        raise TypeError(f"points= takes a list of names, or one text separated by commas, not {points!r}.")
    names = points.split(",") if isinstance(points, str) else list(points)
    found: dict[str, tuple[int, ...] | None] = {}
    for name in names:
        site, layers = parse_point(name)
        known = found.get(site, ())
        found[site] = None if layers is None or known is None else tuple(sorted({*known, *layers}))
    if not found:
        raise InvalidRequest("Name at least one point, such as 'resid_post.12'.", reason="INVALID_FIELD")
    return found


def parse_point(name: str) -> Point:
    """Return the site and the layers of a point.

    Raises:
        InvalidRequest: The name has another form.
        UnknownSite: It names no site.
        TypeError: It is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"A point is a text such as 'resid_post.12', not {name!r}.")
    text = name.strip()
    if text in _OTHERS_AFTER_LAYERS:
        raise UnknownSite(
            f"{name!r} names no rows that are captured here: it has {_OTHERS_AFTER_LAYERS[text]}.",
            reason="UNKNOWN_SITE",
        )
    block = _BLOCK.fullmatch(text)
    if block:
        return _of_block(text, *block.groups())
    if text == EMBEDDINGS:
        return "resid_pre", (0,)
    site, dot, layers = text.partition(".")
    site = _OF_INTERP_ENGINE.get(site, site)
    if site not in SITES:
        raise UnknownSite(
            f"{name!r} is not a point: it does not begin with a site. The sites are {', '.join(SITES)}. Another "
            f"name of resid_pre.0 is {EMBEDDINGS!r}.",
            reason="UNKNOWN_SITE",
        )
    if not dot or layers == "all":
        return site, None
    return site, tuple(layer_list(layers))


def point_names(layers: dict[str, tuple[int, ...] | None]) -> tuple[str, ...]:
    """Return the names of points from the layers at each site; the inverse of `parse_points`."""
    return tuple(f"{site}.{run}" if run else site for site, of_site in layers.items() for run in _runs(of_site))


def _of_block(name: str, layer: str, rest: str) -> Point:
    site = _OF_TRANSFORMER_LENS.get(rest)
    if site is not None:
        return site, (int(layer),)
    known = ", ".join(f"blocks.N.{known}" for known in _OF_TRANSFORMER_LENS)
    why = f"it has {_OTHERS[rest]}" if rest in _OTHERS else f"the names of TransformerLens that do are {known}"
    raise UnknownSite(f"{name!r} names no rows that are captured here: {why}.", reason="UNKNOWN_SITE")


def _runs(layers: Sequence[int] | None) -> list[str]:
    """Return ascending layers as texts such as "3-5"; one empty text for all layers."""
    if layers is None:
        return [""]
    runs = to_ranges(np.array(layers))
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]


def transformer_lens_name(point: str) -> str:
    """Return TransformerLens' name of a point, such as "blocks.12.hook_resid_post"; the point itself if it has none."""
    site, _, layer = point.rpartition(".")
    name = next((name for name, own in _OF_TRANSFORMER_LENS.items() if own == site), None)
    return point if name is None else f"blocks.{layer}.{name}"
