"""The command `patch`: a patch sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

import residuum
from residuum.cli.connection import open_client
from residuum.cli.generation.steering import POSITIONS_HELP
from residuum.cli.output import Output

EXAMPLES = """\
CLEAN CORRUPTED
residuum patch "The capital of France is" "The capital of Italy is" --svg patching.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("clean", metavar="CLEAN", help="the prompt that gives the rows")
    parser.add_argument("corrupted", metavar="CORRUPTED", help="the prompt whose rows are replaced, of as many tokens")
    parser.add_argument("--layers", default="all", metavar="LAYERS", help="such as 12 or 0,5,10-20 (default: all)")
    parser.add_argument(
        "--positions",
        default="prompt",
        metavar="POSITIONS",
        help=f"the rows to patch: {POSITIONS_HELP} (default: prompt)",
    )
    parser.add_argument(
        "--site", default="resid_post", help="the site to patch; `residuum info` lists them (default: resid_post)"
    )
    for name, prompt in (("answer", "CLEAN"), ("other", "CORRUPTED")):
        text = f"the token ID of the answer to {prompt} (default: the first token of the model's reply)"
        parser.add_argument(f"--{name}", type=int, metavar="ID", help=text)
    parser.add_argument(
        "--metric",
        choices=("logit_difference", "logprob"),
        default="logit_difference",
        help="what is scored; logprob is that of --answer alone (default: logit_difference)",
    )
    parser.add_argument("--svg", metavar="FILE", help="write a picture (default: none)")


def run(options: argparse.Namespace, output: Output) -> int:
    """Run the sweep, and print the share of the clean answer that each row brings back."""
    with open_client(options) as client:
        sweep = client.patch_sweep(
            options.clean,
            options.corrupted,
            layers=options.layers,
            positions=options.positions,
            site=options.site,
            metric=options.metric,
            answer=options.answer,
            other=options.other,
            timeout=options.timeout,
        )
    if options.svg:
        Path(options.svg).write_text(sweep.svg(), encoding="utf-8")
    return _show(sweep, output)


def _show(sweep: residuum.PatchSweep, output: Output) -> int:
    shares = sweep.recovered
    if output.as_json:
        output.json({**vars(sweep), "recovered": shares})
        return 0
    tokens = zip(sweep.positions, sweep.clean_tokens, sweep.corrupted_tokens, strict=True)
    columns = [f"{at} {after.strip()}" for at, _, after in tokens]
    output.note(f"share of the clean answer that each row of {sweep.site} brings back, by layer and position")
    output.rows(
        ("layer", *columns),
        (
            {"layer": layer, **{name: f"{share:.2f}" for name, share in zip(columns, of_layer, strict=True)}}
            for layer, of_layer in zip(sweep.layers, shares, strict=True)
        ),
    )
    return 0
