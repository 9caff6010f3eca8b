"""`residuum ui` with something to look at: SmolLM2, a few captures, and a direction and a probe.

.venv/bin/python -m examples.demo.page    # or: make demo-ui
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import residuum
from examples.demo.__main__ import HAPPY, NEW_TOKENS, PROMPTS, SAD, STEERED_PROMPT
from examples.model import default_model
from residuum.ui.gallery import Gallery
from residuum.ui.separation import separations
from svc_common.launcher import ServiceFailedError, running_services
from svc_common.serve_command import ProgressLine

LAYER = 12
CHAT = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is the sea salty?"},
]


def main() -> None:
    """Start the services, fill them, and serve the page until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="examples.demo.page", description=__doc__)
    parser.add_argument("--model", help="the model's folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--port", default="8808", help="the page's port on 127.0.0.1 (default: 8808)")
    options = parser.parse_args()
    try:
        with filled_services(options.model or default_model()) as (endpoint, gallery):
            command = [sys.executable, "-m", "residuum", "ui", "--endpoint", endpoint, "--port", options.port]
            sys.exit(subprocess.run([*command, "--gallery", str(gallery)], check=False).returncode)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ServiceFailedError, residuum.ResiduumError) as error:
        sys.exit(f"DEMO FAILED: {error}")


@contextmanager
def filled_services(model: str) -> Iterator[tuple[str, Path]]:
    """Start both services with captures. Yield the inference service's endpoint, and a gallery for the page."""
    flags = ["--served-model-name", Path(model).name, "--enforce-eager"]
    line = ProgressLine(sys.stderr, shown=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_services(model, inference_arguments=flags, waiting=line.show, up=line.end) as (_, inference),
        residuum.Client(inference.endpoint) as client,
    ):
        fill(client, Path(folder))
        yield inference.endpoint, Path(folder)


def fill(client: residuum.Client, gallery: Path) -> None:
    """Capture a few replies, and save a direction and a probe."""
    positive, negative = examples(client, "last_prompt")
    joy = residuum.directions.difference_of_means(positive, negative)
    Gallery(gallery).save("joy", joy, {"separation": separations(positive, negative, joy.layers)})
    make_probe(joy, *examples(client, "prompt")).save(gallery / "is-joyful.safetensors")
    what = residuum.Capture(labels={"set": "demo"})
    names = [f"demo-{number}" for number in range(len(PROMPTS))]
    client.generate_many(PROMPTS, max_tokens=NEW_TOKENS, capture=what, request_ids=names, progress=False)
    ways = {"happy": 2.0, "plain": 0.0, "sad": -2.0}
    client.generate_many(
        [STEERED_PROMPT] * len(ways),
        max_tokens=NEW_TOKENS,
        capture=[residuum.Capture(labels={"set": "steered", "scale": scale}) for scale in ways.values()],
        steer=[joy.add(scale, layers=[LAYER]) for scale in ways.values()],
        request_ids=[f"door-{way}" for way in ways],
        progress=False,
    )
    client.generate(CHAT, max_tokens=NEW_TOKENS, capture=residuum.Capture(labels={"set": "chat"}), request_id="sea")


def examples(client: residuum.Client, positions: str) -> list[list[residuum.Activations]]:
    """Return rows of happy and of sad prompts, whose captures are deleted."""
    what = residuum.Capture(positions=positions)
    sides = [client.generate_many(prompts, max_tokens=0, capture=what, progress=False) for prompts in (HAPPY, SAD)]
    found = [list(client.activations(replies)) for replies in sides]
    for replies in sides:
        client.delete(replies)
    return found


def make_probe(
    joy: residuum.Directions, positive: Sequence[residuum.Activations], negative: Sequence[residuum.Activations]
) -> residuum.Probe:
    """Return the probe that tells the tokens of both sides apart by their projections: a linear discriminant analysis.

    The first token is left out: its row is the same in all prompts, and much longer than the others.
    """
    high, low = (np.concatenate([joy.project(acts)[LAYER][1:] for acts in side]) for side in (positive, negative))
    spread = np.concatenate([high - high.mean(), low - low.mean()]).std()
    slope = (high.mean() - low.mean()) / spread**2
    weights = joy[LAYER].values / joy[LAYER].norm * slope
    middle = (high.mean() + low.mean()) / 2
    return residuum.Probe(weights, bias=-slope * middle, layer=LAYER, activation="sigmoid", name="is-joyful")


if __name__ == "__main__":
    main()
