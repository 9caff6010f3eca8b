"""Where does a fact come from? Two pictures of a model that answers two prompts of the same length.

    residuum serve --model FOLDER --temporary    # in another terminal
    python -m examples.pictures "The capital of France is" "The capital of Italy is" --folder pictures

It writes two files. `logit-lens.svg` shows what each layer predicts for the first prompt. `patch-sweep.svg` shows which
rows of the first prompt, set in the second one, make the model answer the first. It prints both in short.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import residuum


def draw_lens(client: residuum.Client, prompt: str, folder: Path) -> residuum.LogitLens:
    """Write what each layer predicts at each position of a prompt."""
    reply = client.generate(prompt, max_tokens=1, capture=residuum.Capture(layers="all"))
    try:
        lens = client.logit_lens(reply)
    finally:
        client.delete(reply)
    (folder / "logit-lens.svg").write_text(lens.svg(), encoding="utf-8")
    return lens


def draw_sweep(
    client: residuum.Client, clean: str, corrupted: str, folder: Path, layers: str | list[int] = "all"
) -> residuum.PatchSweep:
    """Write how much of the answer to the clean prompt each of its rows brings into the corrupted one."""
    sweep = client.patch_sweep(clean, corrupted, layers=layers)
    (folder / "patch-sweep.svg").write_text(sweep.svg(), encoding="utf-8")
    return sweep


def first_layer(lens: residuum.LogitLens) -> int:
    """Return the first layer from which on the last position predicts the token that came, up to the last layer."""
    wrong = np.flatnonzero(lens.ranks[:, -1] != 1)
    return lens.layers[min(wrong[-1] + 1, len(lens.layers) - 1) if len(wrong) else 0]


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clean", help="the prompt whose answer is looked for")
    parser.add_argument("corrupted", help="a prompt with as many tokens and another answer")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the pictures go (default: here)")
    parser.add_argument("--endpoint", default="localhost:50051", help="the inference service")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with residuum.Client(options.endpoint) as client:
        lens = draw_lens(client, options.clean, options.folder)
        sweep = draw_sweep(client, options.clean, options.corrupted, options.folder)
    print(f"The last position predicts {lens.top_texts[-1][-1]!r} from layer {first_layer(lens)} on.")
    for layer, shares in zip(sweep.layers, sweep.recovered, strict=True):
        best = int(np.argmax(shares))
        print(f"layer {layer:2}: {sweep.clean_tokens[best]!r} brings back {shares[best]:.0%}")


if __name__ == "__main__":
    main()
