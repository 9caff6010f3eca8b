"""The requests for each architecture: a few concurrent requests, some of them steered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.conformance.architectures import HIDDEN, LAYERS, VOCABULARY

Rows = npt.NDArray[np.float32]


NEW_TOKENS = 16
LONG_REPLY = 100
"""The tokens of the request whose steering changes: enough that it still generates when the change arrives."""
CHUNK = 64
"""The most tokens of a step, so that prompts are computed in chunks, in steps that also generate replies."""

_LENGTHS = (1, 2, 33, 64, 100, 150)
"""Lengths of the prompts: a single token, one more than a block, exactly a chunk, several chunks."""
_FIRST_TOKEN = 3
"""Lower token IDs are special tokens."""


@dataclass(frozen=True)
class Request:
    """One request."""

    prompt: tuple[int, ...]
    pushes: dict[tuple[str, int], Rows] = field(default_factory=dict)
    """The vector that is added to the rows at a site of a layer, [width], by site and layer."""
    later: dict[tuple[str, int], Rows] = field(default_factory=dict)
    """Those that replace them while the request generates."""

    @property
    def new_tokens(self) -> int:
        """The tokens of its reply."""
        return LONG_REPLY if self.later else NEW_TOKENS


MAX_REQUESTS = 10
"""Most requests at a time: those of `make_requests`, and that of `make_changed_request`."""


def make_requests(inside: Mapping[str, tuple[int, Sequence[int]]] | None = None) -> list[Request]:
    """Return the requests. They are always the same.

    Args:
        inside: The sites inside the layers where rows can be steered: the elements of a row, and the layers.
    """
    source = np.random.default_rng(11)
    requests = []
    for length in _LENGTHS:
        prompt = tuple(int(token) for token in source.integers(_FIRST_TOKEN, VOCABULARY, size=length))
        requests.append(Request(prompt))
        if length in {_LENGTHS[2], _LENGTHS[4]}:
            # The same prompt again, steered after two layers. It must not change the first request or share its cache.
            pushes = {("resid_post", layer): _push(source, HIDDEN) for layer in (0, LAYERS - 2)}
            requests.append(Request(prompt, pushes))
    if inside:  # steered at all sites at once
        pushes = {
            (site, layer): _push(source, width)
            for site, (width, layers) in inside.items()
            for layer in (layers[0], layers[max(len(layers) - 2, 0)])
        }
        requests.append(Request(requests[_LENGTHS.index(33)].prompt, pushes))
    return requests


def make_changed_request() -> Request:
    """Return the request whose steering changes while it generates. It is always the same."""
    source = np.random.default_rng(12)
    prompt = tuple(int(token) for token in source.integers(_FIRST_TOKEN, VOCABULARY, size=33))
    first, later = ({("resid_post", layer): _push(source, HIDDEN)} for layer in (0, LAYERS - 2))
    return Request(prompt, first, later)


def _push(source: np.random.Generator, width: int) -> Rows:
    return (0.5 * source.standard_normal(width)).astype(np.float32)
