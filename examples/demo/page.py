"""`residuum ui` with something to look at: SmolLM2, a few captures, and a direction from happy and sad prompts.

.venv/bin/python -m examples.demo.page    # or: make demo-ui
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import residuum
from examples.demo.__main__ import HAPPY, NEW_TOKENS, PROMPTS, SAD, STEERED_PROMPT
from examples.model import default_model
from svc_common.launcher import ServiceFailedError, running_services
from svc_common.serve_command import ProgressLine

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
    """Start both services with captures. Yield the inference service's endpoint, and a gallery with a direction."""
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
    """Capture a few replies, and save a direction."""
    joy = make_direction(client)
    joy.save(gallery / "joy.safetensors")
    what = residuum.Capture(labels={"set": "demo"})
    names = [f"demo-{number}" for number in range(len(PROMPTS))]
    client.generate_many(PROMPTS, max_tokens=NEW_TOKENS, capture=what, request_ids=names, progress=False)
    ways = {"happy": 2.0, "plain": 0.0, "sad": -2.0}
    client.generate_many(
        [STEERED_PROMPT] * len(ways),
        max_tokens=NEW_TOKENS,
        capture=[residuum.Capture(labels={"set": "steered", "scale": scale}) for scale in ways.values()],
        steer=[joy.add(scale, layers=[12]) for scale in ways.values()],
        request_ids=[f"door-{way}" for way in ways],
        progress=False,
    )
    client.generate(CHAT, max_tokens=NEW_TOKENS, capture=residuum.Capture(labels={"set": "chat"}), request_id="sea")


def make_direction(client: residuum.Client) -> residuum.Directions:
    """Return the direction from sad to happy prompts. Its captures are deleted."""
    what = residuum.Capture(positions="prompt")
    sides = [client.generate_many(prompts, max_tokens=0, capture=what, progress=False) for prompts in (HAPPY, SAD)]
    positive, negative = (client.activations(replies) for replies in sides)
    for replies in sides:
        client.delete(replies)
    return residuum.directions.difference_of_means(positive, negative, positions="last_prompt")


if __name__ == "__main__":
    main()
