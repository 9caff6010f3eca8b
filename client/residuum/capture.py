"""What a request captures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from residuum.exceptions import InvalidRequest, UnknownSite
from residuum.selections import LayersLike, Positions, PositionsLike, layer_list, layer_selection
from residuum.v1 import capture_pb2

SITES: dict[str, capture_pb2.Site.ValueType] = {
    "resid_post": capture_pb2.SITE_RESID_POST,
    "resid_pre": capture_pb2.SITE_RESID_PRE,
    "attn_out": capture_pb2.SITE_ATTN_OUT,
    "mlp_out": capture_pb2.SITE_MLP_OUT,
}
"""The capture sites by name."""

SITE_NAMES = {number: name for name, number in SITES.items()}

_ENCODINGS = {"raw": capture_pb2.ENCODING_RAW}
_OVERFLOW = {"wait": capture_pb2.OVERFLOW_POLICY_WAIT, "shed": capture_pb2.OVERFLOW_POLICY_SHED}


@dataclass(frozen=True)
class Capture:
    """What a request captures. Layers count from 0; `client.info().sites` names the sites that the server has.

    Example:
        >>> residuum.Capture(layers="all")
        >>> residuum.Capture(layers=[0, 5, 10], positions="last_prompt")
        >>> residuum.Capture(layers=[12], sites=["resid_pre", "attn_out", "mlp_out"])
    """

    layers: LayersLike = "all"
    """"all", a number, a range or a list of numbers."""
    sites: str | Sequence[str] = ("resid_post",)
    """Where in a layer: "resid_post" (the residual stream after it and its steering), "resid_pre" (the stream before
    it), "attn_out", "mlp_out" (what its attention and its MLP add). Those that the server was started with, as a list
    or separated by commas. `acts[k]` reads the first of them; `acts.select(site=...)` any other."""
    positions: PositionsLike = None
    """Which tokens; see `Positions.of`. By default all, prompt and generated."""
    encoding: Literal["raw"] = "raw"
    """How rows are stored: "raw" as the model computed them, in its own dtype."""
    overflow: Literal["wait", "shed"] = "wait"
    """What happens when the path to the store is full: the model waits, or rows are dropped and the capture ends
    incomplete. Never silently."""
    before_steering: bool = False
    """Capture rows as they were before they were steered, instead of what the model goes on with. "resid_pre" is then
    the stream as the layer before gave it, too, so that the sites of a layer do not add up if that one was steered."""

    def __post_init__(self) -> None:
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(layer_list(self.layers)))
        sites = site_list(self.sites)
        if isinstance(self.sites, (set, frozenset)):  # has no order, and the first site is the one that `acts[k]` reads
            sites = tuple(sorted(sites, key=list(SITES).index)) if SITES.keys() >= self.sites else sites
        object.__setattr__(self, "sites", sites)
        object.__setattr__(self, "positions", Positions.of(self.positions))
        if not isinstance(self.before_steering, bool):
            raise TypeError(f"before_steering is True or False, not {self.before_steering!r}.")
        self.to_proto()

    def to_proto(self) -> capture_pb2.CaptureSpec:
        """Return the message, checked.

        Raises:
            InvalidRequest: It can never be meant so; the message says why.
        """
        if self.encoding not in _ENCODINGS:
            raise InvalidRequest(f"encoding={self.encoding!r} is not known; there is 'raw'.", reason="INVALID_FIELD")
        if self.overflow not in _OVERFLOW:
            raise InvalidRequest(f"overflow={self.overflow!r} is not known; write 'wait' or 'shed'.")
        return capture_pb2.CaptureSpec(
            layers=layer_selection(self.layers),
            sites=site_numbers(self.sites),
            positions=Positions.of(self.positions).to_proto() if self.positions != Positions() else None,
            encoding=_ENCODINGS[self.encoding],
            overflow=_OVERFLOW[self.overflow],
            before_steering=self.before_steering,
        )


def site_list(sites: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of sites as a user writes them: a list, or one text with commas between the names."""
    if not isinstance(sites, Iterable):
        raise TypeError(f"sites= takes a list of names, or one text with commas between them, not {sites!r}.")
    return tuple(name.strip() for name in sites.split(",")) if isinstance(sites, str) else tuple(sites)


def site_numbers(sites: str | Sequence[str]) -> list[capture_pb2.Site.ValueType]:
    """Return sites by name as the contract numbers them, in the order given.

    Raises:
        UnknownSite: There is no site of this name.
        InvalidRequest: A site is named twice, or none is named.
    """
    names = site_list(sites)
    for name in names:
        if name not in SITES:
            raise UnknownSite(f"{name!r} is not a site; {_instead_of(name)}.", reason="UNKNOWN_SITE")
    if not names or len(set(names)) != len(names):
        raise InvalidRequest("Name at least one site, and each once.", reason="INVALID_FIELD")
    return [SITES[name] for name in names]


def _instead_of(name: str) -> str:
    if name == "all":  # as layers have it; only the server knows which sites these would be
        return "sites=client.info().sites names all that the server was started with"
    return f"there are {', '.join(SITES)}"
