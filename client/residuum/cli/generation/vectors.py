"""The commands that make and send vectors: `directions`, `vectors put` and `vectors find`."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import residuum
from residuum.cli.connection import advice_if_cut_off, open_client, plain_warnings
from residuum.cli.generation.generate import prompts_of
from residuum.cli.generation.steering import POSITIONS_HELP, load_all
from residuum.cli.output import Output
from residuum.exports.target import check_free
from residuum.protocol.requests import Prompt
from residuum.transport.progress import size

DIRECTIONS_EXAMPLES = """\
OUT --positive FILE --negative FILE
residuum directions joy.safetensors --positive happy.txt --negative sad.txt
residuum generate "When I opened the door" --add joy.safetensors@12*2"""

_LATER_SECONDS = 1.0
_DELETE_SECONDS = 10.0

_METHODS = ("difference_of_means", "pca_center", "pca_diff")


def add_directions_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `directions`."""
    parser.add_argument("out", metavar="OUT", help="the .safetensors file to write, for --add and Directions.load")
    for name, text in (("positive", "the direction points to"), ("negative", "the direction points away from")):
        parser.add_argument(
            f"--{name}",
            required=True,
            metavar="FILE",
            help=f"a UTF-8 file with the prompts that {text}, one per line (default: none, it must be given)",
        )
    parser.add_argument("--chat", action="store_true", help="treat prompts as messages in a chat (default: plain text)")
    parser.add_argument(
        "--method",
        choices=_METHODS,
        default=_METHODS[0],
        help="how to compute it; pca_diff needs as many positive as negative prompts (default: difference_of_means)",
    )
    parser.add_argument("--layers", default="all", metavar="LAYERS", help="such as 12 or 0,5,10-20 (default: all)")
    parser.add_argument(
        "--positions", default="last_prompt", help=f"the rows to use: {POSITIONS_HELP} (default: last_prompt)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=1, metavar="M", help="tokens to generate for each prompt (default: 1)"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists (default: fail)")


def directions(options: argparse.Namespace, output: Output) -> int:
    """Capture two sets of prompts, compute a direction for each layer, and save them. The captures are deleted."""
    if Path(options.out).suffix != ".safetensors":
        options.usage_error(f"OUT must end with .safetensors, but is {options.out!r}")
    check_free(Path(options.out), overwrite=options.force)
    capture = residuum.Capture(layers=options.layers, positions=options.positions)
    sets = [prompts_of(path, chat=options.chat) for path in (options.positive, options.negative)]
    with (
        open_client(options) as client,
        advice_if_cut_off("Nothing was saved; run the command again."),
        plain_warnings(output),
        _captured(client, sets, capture, options, output) as replies,
    ):
        positive, negative = (map(client.activations, of_set) for of_set in replies)
        if options.method == "difference_of_means":
            made = residuum.directions.difference_of_means(positive, negative, positions=options.positions)
        else:
            made = residuum.directions.pca(positive, negative, method=options.method, positions=options.positions)
    made.save(options.out)
    if output.as_json:
        output.json({"path": options.out, "layers": made.layers, "hidden_size": made.hidden_size})
    else:
        output.say(f"{options.out}: {made}")
    return 0


@contextlib.contextmanager
def _captured(
    client: residuum.Client,
    sets: list[list[Prompt]],
    capture: residuum.Capture,
    options: argparse.Namespace,
    output: Output,
) -> Iterator[list[list[residuum.Reply]]]:
    """Capture sets of prompts, and delete the captures afterwards, also those of requests that did not end."""
    prefix, never_there = f"directions-{secrets.token_hex(8)}-", False
    try:
        yield [
            client.generate_many(
                prompts,
                capture=capture,
                request_ids=[f"{prefix}{number}-{index}" for index in range(len(prompts))],
                max_tokens=options.max_tokens,
                timeout=options.timeout,
                progress=not output.as_json,
            )
            for number, prompts in enumerate(sets)
        ]
    except residuum.BatchFailed as error:
        never_there = not client._channels.has_answered(client.endpoint)  # noqa: SLF001
        raise residuum.BatchFailed(error.replies, error.errors) from None  # no advice to keep what is done
    except KeyboardInterrupt:
        time.sleep(_LATER_SECONDS)  # a request that was just stopped may have a capture a moment later
        raise
    finally:
        if not never_there:
            # If the service or a store is away, what failed before says so.
            with contextlib.suppress(residuum.ResiduumError), open_client(options, _DELETE_SECONDS) as brief:
                brief.delete(prefix=prefix)


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vectors put` and `vectors find`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help=".npy or .safetensors")


def put_vectors(options: argparse.Namespace, output: Output) -> int:
    """Send the files' vectors that the server lacks."""
    vectors = load_all(options.files)
    with open_client(options) as client:
        result = client.put_vectors([vector for _, vector in vectors])
    names = [{"name": name, "digest": vector.hexdigest} for name, vector in vectors]
    if output.as_json:
        output.json({"vectors": names, "sent": result.sent, "bytes_sent": result.bytes_sent})
        return 0
    output.rows(("name", "digest"), names)
    output.say(f"{result.sent} of {len(names)} sent, {size(result.bytes_sent)}")
    return 0


def find_vectors(options: argparse.Namespace, output: Output) -> int:
    """Show which of the files' vectors the server has. Return 1 if it lacks one."""
    vectors = load_all(options.files)
    with open_client(options) as client:
        missing = set(client.find_missing_vectors([vector for _, vector in vectors]))
    output.rows(
        ("name", "digest", "present"),
        ({"name": name, "digest": vector.hexdigest, "present": vector not in missing} for name, vector in vectors),
    )
    return 1 if missing else 0
