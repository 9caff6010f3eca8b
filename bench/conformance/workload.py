"""What each architecture is asked: a handful of requests at once, some of them steered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.conformance.architectures import HIDDEN, LAYERS, VOCABULARY

Rows = npt.NDArray[np.float32]


NEW_TOKENS = 16
CHUNK = 64
"""Tokens of a step at most, so that prompts are computed in chunks, beside each other's replies."""

_LENGTHS = (1, 2, 33, 64, 100, 150)
"""Of the prompts: a single token, one more than a block, exactly a chunk, several chunks."""
_FIRST_TOKEN = 3
"""Those below have a meaning of their own."""


@dataclass(frozen=True)
class Request:
    """One request."""

    prompt: tuple[int, ...]
    pushes: dict[int, Rows] = field(default_factory=dict)
    """What is added to the residual stream after a layer, [hidden], by layer."""


def make_requests() -> list[Request]:
    """Return the requests; always the same."""
    source = np.random.default_rng(11)
    requests = []
    for length in _LENGTHS:
        prompt = tuple(int(token) for token in source.integers(_FIRST_TOKEN, VOCABULARY, size=length))
        requests.append(Request(prompt))
        if length in {_LENGTHS[2], _LENGTHS[4]}:
            # The same prompt once more, steered after two layers: it must not move its twin, nor share its cache.
            requests.append(Request(prompt, {layer: _push(source) for layer in (0, LAYERS - 2)}))
    return requests


def _push(source: np.random.Generator) -> Rows:
    return (0.5 * source.standard_normal(HIDDEN)).astype(np.float32)
