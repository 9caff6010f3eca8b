"""The command `lens`: a logit lens."""

from __future__ import annotations

import argparse
from pathlib import Path

import residuum
from residuum.cli.connection import open_client
from residuum.cli.generation.steering import POSITIONS_HELP
from residuum.cli.output import Output
from residuum.cli.parser import positive_count
from residuum.protocol.generation.lens import visible

EXAMPLES = """\
PROMPT
residuum lens "The capital of France is" --svg lens.svg
residuum lens "The capital of France is" --lens lens/gpt2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt")
    parser.add_argument("--layers", default="all", metavar="LAYERS", help="such as 12 or 0,5,10-20 (default: all)")
    parser.add_argument(
        "--positions", default="prompt", metavar="POSITIONS", help=f"the rows: {POSITIONS_HELP} (default: prompt)"
    )
    parser.add_argument("--max-tokens", type=int, default=1, metavar="N", help="tokens to generate (default: 1)")
    parser.add_argument(
        "--top-k", type=positive_count, default=5, metavar="K", help="tokens of a row with --json (default: 5)"
    )
    parser.add_argument(
        "--lens",
        metavar="PATH",
        help="a lens: a file of Lens.save, or a folder of the package tuned-lens (default: the logit lens)",
    )
    parser.add_argument("--svg", metavar="FILE", help="write a picture (default: none)")


def run(options: argparse.Namespace, output: Output) -> int:
    """Capture the prompt, print what each layer predicts at each position, and delete the capture."""
    lens = None if options.lens is None else _read(options.lens)
    with open_client(options) as client:
        capture = residuum.Capture(layers=options.layers, positions=options.positions)
        reply = client.generate(options.prompt, capture=capture, max_tokens=options.max_tokens, timeout=options.timeout)
        try:
            found = client.logit_lens(reply, lens=lens, top_k=options.top_k, timeout=options.timeout)
        finally:
            client.delete(reply)
    if options.svg:
        Path(options.svg).write_text(found.svg(), encoding="utf-8")
    return _show(found, output)


def _read(path: str) -> residuum.Lens:
    return residuum.Lens.from_tuned_lens(path) if Path(path).is_dir() else residuum.Lens.load(path)


def _show(lens: residuum.LogitLens, output: Output) -> int:
    texts, predicted = lens.top_texts, lens.predicted
    if output.as_json:
        fields = {name: getattr(lens, name) for name in ("site", "layers", "positions", "tokens")}
        arrays = {
            "next_tokens": lens.next_tokens.tolist(),
            "top_ids": predicted.top_ids.tolist(),
            "top": predicted.top.tolist(),
            "ranks": lens.ranks.tolist(),
            "texts": {str(token): text for token, text in predicted.texts.items()},
        }
        output.json({**fields, **arrays})
        return 0
    columns = [f"{at} {visible(token)}" for at, token in zip(lens.positions, lens.tokens, strict=True)]
    output.note(f"the most likely next token that {lens.site} predicts, by layer and position")
    output.rows(
        ("layer", *columns),
        (
            {"layer": layer, **{name: visible(text) for name, text in zip(columns, row, strict=True)}}
            for layer, row in zip(lens.layers, texts, strict=True)
        ),
    )
    return 0
