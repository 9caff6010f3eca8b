"""A probe's verdict on each token while the model writes, and a rule that ends the reply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import residuum

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import Console

PROMPT = "This is the worst day of my life. I am alone and"
BELOW = 0.25
FOR_TOKENS = 4
_NEW_TOKENS = 40


def make_probe(happy: npt.NDArray[np.float32], sad: npt.NDArray[np.float32], layer: int) -> residuum.Probe:
    """Return a probe whose score is 0.88 for the mean happy row, 0.12 for the mean sad one, and 0.5 halfway."""
    direction = happy - sad
    weights = 4.0 * direction / (direction @ direction)
    bias = -weights @ (happy + sad) / 2
    return residuum.Probe(weights, bias, layer=layer, activation="sigmoid", name="happy")


def watch(client: residuum.Client, probe: residuum.Probe, console: Console) -> residuum.Reply:
    """Print each token in the colour of its score as it arrives, until the rule ends the reply."""
    rule = residuum.Rule(probe, below=BELOW, for_tokens=FOR_TOKENS, then="abort", name="sad")
    console.print(f"{PROMPT}", end="", markup=False)
    with client.stream(PROMPT, max_tokens=_NEW_TOKENS, rules=[rule]) as stream:
        for delta in stream:
            scores = (delta.scores or {})[probe.name]
            console.print(
                delta.text, style=_colour(float(scores.mean())) if len(scores) else None, end="", markup=False
            )
    reply = stream.reply
    console.print()
    assert reply.scores is not None  # noqa: S101 - the request has a probe
    console.print("scores: " + " ".join(f"{score:.2f}" for score in reply.scores[probe.name]))
    for event in reply.events:
        console.print(
            f"rule {event.rule!r} fired at token {event.token} (score {event.score:.2f}): the reply ended there"
        )
    return reply


def _colour(score: float) -> str:
    return "green" if score > 1 - BELOW else "red" if score < BELOW else "yellow"
