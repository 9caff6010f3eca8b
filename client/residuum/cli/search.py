"""The command `search`: finds tokens by a direction."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import residuum
from residuum.cli.captures import add_filter
from residuum.cli.connection import open_client
from residuum.cli.generation.steering import POSITIONS_HELP, load
from residuum.cli.output import Output
from residuum.cli.parser import positive_count

EXAMPLES = """\
VECTOR --layer LAYER
residuum search joy.safetensors --layer 12 --k 20
residuum search joy.npy --layer 12 --cosine --least --where 'split = train'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "vector",
        metavar="VECTOR",
        help="a .npy file, FILE.safetensors:NAME, or a file of Directions.save, which has a vector for each layer",
    )
    parser.add_argument(
        "--layer", type=int, required=True, metavar="LAYER", help="the layer (default: none, it must be given)"
    )
    parser.add_argument("--site", metavar="SITE", help="the site (default: that of the directions, or resid_post)")
    parser.add_argument(
        "-k", "--k", type=positive_count, default=20, metavar="K", help="at most this many tokens (default: 20)"
    )
    order = parser.add_mutually_exclusive_group()
    for name, text in (("least", "the smallest scores first"), ("absolute", "the largest absolute values first")):
        order.add_argument(
            f"--{name}", dest="order", action="store_const", const=name, default="most", help=f"{text} (default: no)"
        )
    parser.add_argument(
        "--cosine",
        action="store_true",
        help="score by the cosine of the angle (default: by the dot product of row and vector)",
    )
    add_filter(parser)
    parser.add_argument("--positions", metavar="POSITIONS", help=f"the rows: {POSITIONS_HELP} (default: all)")
    parser.add_argument(
        "--per-capture", type=positive_count, metavar="N", help="at most this many of each capture (default: no limit)"
    )
    parser.add_argument(
        "--context", type=int, default=8, metavar="N", help="tokens of text before and after each token (default: 8)"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the tokens whose rows project most onto a vector."""
    vector = load(options.vector)
    with open_client(options) as client:
        found = client.search(
            vector,
            layer=options.layer,
            k=options.k,
            site=options.site,
            measure="cosine" if options.cosine else "projection",
            order=options.order,
            per_capture=options.per_capture,
            context=options.context,
            prefix=options.prefix,
            states=options.state,
            where=options.where,
            positions=options.positions,
            timeout=options.timeout,
            progress=not output.as_json,
        )
    columns = ("score", "capture_id", "sequence", "position", "text")
    output.rows(columns, (_row(hit, output) for hit in found), optional=("sequence",))
    output.note(found.summary)
    return 0


def _row(hit: residuum.SearchHit, output: Output) -> dict[str, Any]:
    if output.as_json:
        return dataclasses.asdict(hit)
    return {**dataclasses.asdict(hit), "score": f"{hit.score:.6g}", "text": hit.text}
