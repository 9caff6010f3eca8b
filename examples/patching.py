"""Activation patching on SmolLM2: which rows of one prompt make the model answer as it does for another prompt?

    residuum serve --model FOLDER --temporary &
    python -m examples.patching docs/pictures/patching.svg

One at a time, each row of "The capital of Italy is", after each layer, is set to the row of "The capital of France is"
at the same position. The picture shows how much of the log-probability of " Paris" each row brings back.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import residuum

if TYPE_CHECKING:
    import numpy.typing as npt

CLEAN, CORRUPTED, ANSWER = "The capital of France is", "The capital of Italy is", " Paris"
TOKENS = ("The", "capital", "of", "France → Italy", "is")
CELL, LEFT, TOP = (56, 14), 64, 26


def patch(client: residuum.Client) -> npt.NDArray[np.float64]:
    """Return the share that each row brings back, [layers, positions]: 0 for nothing, 1 for all."""
    reply = client.generate(CLEAN, max_tokens=0, capture=residuum.Capture())
    acts = client.activations(reply)
    answer = client.generate(CLEAN, max_tokens=1).token_ids[0]
    corrupted = client.generate(CORRUPTED, max_tokens=0).prompt_token_ids
    places = [(layer, position) for layer in acts.layers for position in range(len(corrupted))]
    steering = [residuum.Set.from_activations(acts, layers=[layer], positions=[position]) for layer, position in places]
    replies = client.generate_many(
        [[*reply.prompt_token_ids, answer], *[[*corrupted, answer]] * (len(places) + 1)],
        steer=[None, None, *steering],
        max_tokens=0,
        prompt_logprobs=0,
        progress=False,
    )
    scores = [item.prompt_logprobs.tokens[-1] for item in replies if item.prompt_logprobs is not None]
    clean, plain, patched = scores[0], scores[1], np.array(scores[2:], np.float64)
    return ((patched - plain) / (clean - plain)).reshape(len(acts.layers), len(corrupted))


def svg(found: npt.NDArray[np.float64]) -> str:
    """Return the picture: layers from bottom to top, positions from left to right."""
    layers, positions = found.shape
    width, height = LEFT + CELL[0] * positions + 12, TOP + CELL[1] * layers + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<style>text { font-size: 10px }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="14">share of the log-probability of “{ANSWER.strip()}” that a row brings back</text>',
    ]
    for layer in range(layers):
        y = TOP + CELL[1] * (layers - 1 - layer)
        if layer % 5 == 0 or layer == layers - 1:
            lines.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">layer {layer}</text>')
        for position in range(positions):
            share = float(np.clip(found[layer, position], 0, 1))
            shade = [round(255 - share * (255 - end)) for end in (178, 24, 43)]
            x = LEFT + CELL[0] * position
            lines.append(
                f'<rect x="{x}" y="{y}" width="{CELL[0]}" height="{CELL[1]}" fill="rgb{tuple(shade)}" '
                'stroke="#ddd" stroke-width="0.5"/>'
            )
    for position, token in enumerate(TOKENS):
        x, y = LEFT + CELL[0] * position + CELL[0] // 2, TOP + CELL[1] * layers + 14
        for row, word in enumerate(token.split(" → ")):
            text = f"→ {word}" if row else word
            lines.append(f'<text x="{x}" y="{y + 12 * row}" text-anchor="middle">{text}</text>')
    return "\n".join([*lines, "</svg>\n"])


def main() -> None:
    """Patch, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--endpoint", default="localhost:50051", help="the inference service")
    options = parser.parse_args()
    with residuum.Client(options.endpoint) as client:
        found = patch(client)
    options.picture.write_text(svg(found), encoding="utf-8")
    print(np.round(found, 2))


if __name__ == "__main__":
    main()
