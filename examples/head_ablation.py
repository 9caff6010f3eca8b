"""Which attention heads does an answer need? Each head is removed once, and the answer is scored again.

    residuum serve --model FOLDER --temporary --capture-sites resid_post,z    # in another terminal
    python -m examples.head_ablation "The capital of France is" --layers 20,21,22

It prints the heads whose removal changes the log-probability of the model's answer most.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

import residuum

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_SHOWN = 10


def ablate(client: residuum.Client, prompt: str, layers: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return how much the log-probability of the model's answer changes without each head, [layers, heads]."""
    info = client.info()
    reply = client.generate(prompt, max_tokens=1)
    scored = [*reply.prompt_token_ids, reply.token_ids[0]]  # the last token of this prompt is the answer
    removed = [
        [residuum.Multiply(info.mask("z", [head]), layer=layer, site="z")]
        for layer in layers
        for head in range(info.num_heads)
    ]
    replies = client.generate_many(
        [scored] * (1 + len(removed)), steer=[None, *removed], max_tokens=0, prompt_logprobs=0, progress=False
    )
    scores = np.array([item.prompt_logprobs.tokens[-1] for item in replies if item.prompt_logprobs], np.float64)
    return (scores[1:] - scores[0]).reshape(len(layers), info.num_heads)


def main() -> None:
    """Remove each head once, and print the most important ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", help="the prompt")
    parser.add_argument("--layers", default="", help="layers separated by commas (default: all)")
    parser.add_argument("--endpoint", default="localhost:50051", help="the inference service")
    options = parser.parse_args()
    with residuum.Client(options.endpoint) as client:
        named = [int(layer) for layer in options.layers.split(",") if layer]
        layers = named or list(range(client.info().num_layers))
        changes = ablate(client, options.prompt, layers)
    order = np.argsort(-np.abs(changes), axis=None)[:_SHOWN]
    for row, head in zip(*np.unravel_index(order, changes.shape), strict=True):
        print(f"layer {layers[row]:2}, head {head:2}: {changes[row, head]:+.3f}")


if __name__ == "__main__":
    main()
