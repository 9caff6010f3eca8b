"""`residuum generate`: text for a prompt or a file of prompts, with capture and steering."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import residuum
from residuum.cli import steering
from residuum.cli.connection import advice_if_cut_off, open_client
from residuum.cli.labels import parse_labels
from residuum.cli.output import Output
from residuum.cli.parser import positive_count
from residuum.protocol.requests import IF_EXISTS, Prompt
from residuum.values.capture import AXES, REDUCTIONS
from residuum.wire.encodings import ENCODINGS

EXAMPLES = """\
PROMPT
residuum generate "I love this" --max-tokens 20
residuum generate "I love this" --capture 12 --id joyful
residuum generate "Tell me more" --chat --add joy.safetensors@12*4
residuum generate --file prompts.txt --capture all --positions last_prompt"""

SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "the most tokens to generate (default: 16)"),
    "temperature": (float, "the sampling temperature, up to 2 (default: 0, greedy)"),
    "top_p": (float, "sample from the most likely tokens with this total probability (default: 1)"),
    "top_k": (int, "sample from this many most likely tokens (default: 0, all)"),
    "seed": (int, "the random seed, which makes sampling repeatable (default: none)"),
    "min_tokens": (int, "the fewest tokens to generate (default: 0)"),
    "n": (int, "the number of replies, at most 64 (default: 1)"),
}
"""The numeric sampling parameters, with their help texts."""

_CAPTURE_FLAGS = [
    "positions",
    "sites",
    "before_steering",
    "encoding",
    "dimensions",
    "encoding_seed",
    "axis",
    "onto",
    "reduction",
    "label",
    "keep_prompt",
]
"""Flags that need --capture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--file", metavar="FILE", help="a UTF-8 file with one prompt per line, instead of PROMPT (default: none)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="treat the prompt as a user's message in a chat (default: as plain text)"
    )
    parser.add_argument(
        "--id", dest="request_id", help="your own ID for the request and its capture (default: the server's choice)"
    )
    parser.add_argument(
        "--if-exists",
        choices=IF_EXISTS,
        default="fail",
        help="if a capture with this ID exists: fail; replace it; or skip, which prints what a complete capture of the "
        "same request holds, and replaces one that is not complete (default: fail)",
    )
    _add_sampling(parser)
    _add_capture(parser)
    steering.add_arguments(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, help_text) in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name[0].upper(), help=help_text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop at this text; may be repeated (default: none)"
    )


def _add_capture(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("capture")
    group.add_argument(
        "--capture", metavar="LAYERS", help="capture these layers: all, 12 or 0,5,10-20 (default: capture nothing)"
    )
    group.add_argument(
        "--positions",
        metavar="POSITIONS",
        help=f"the positions to capture: {steering.POSITIONS_HELP} (default: all)",
    )
    group.add_argument(
        "--sites",
        metavar="SITES",
        help="the sites to capture, separated by commas; `residuum info` lists them (default: resid_post)",
    )
    group.add_argument(
        "--before-steering",
        action="store_true",
        help="capture rows as they were before steering (default: as the model continues with them)",
    )
    group.add_argument(
        "--encoding",
        choices=ENCODINGS,
        metavar="NAME",
        help=f"the encoding of captured rows: {', '.join(ENCODINGS)}; see docs/encodings.md (default: the server's, "
        "usually raw)",
    )
    group.add_argument(
        "--dimensions",
        type=positive_count,
        metavar="K",
        help="the dimensions of rp8 and rp, or the elements that topk8 and topk keep (default: the server's, usually "
        "512 and 128)",
    )
    group.add_argument("--encoding-seed", type=int, metavar="N", help="the seed of rp8 and rp (default: 0)")
    group.add_argument(
        "--axis", choices=AXES, help="which numbers share a scale in full8: those of a row or dimension (default: row)"
    )
    group.add_argument(
        "--onto",
        action="append",
        metavar="FILE",
        help="project captured rows onto the vectors of this file, as for --add; may be repeated (default: none)",
    )
    group.add_argument(
        "--reduction",
        choices=REDUCTIONS,
        metavar="NAME",
        help="capture one row for the prompt and one for the generated tokens, reduced this way: "
        f"{', '.join(REDUCTIONS)} (default: none)",
    )
    group.add_argument(
        "--label",
        action="append",
        metavar="NAME=VALUE",
        help="a label of the capture, as for `residuum label`; may be repeated (default: none)",
    )
    group.add_argument(
        "--keep-prompt", action="store_true", help="keep the prompt's text with the capture (default: only its tokens)"
    )


def generate(options: argparse.Namespace, output: Output) -> int:
    """Generate text and print it as it arrives; for a file of prompts, print the replies in their order."""
    if options.capture is None:
        for flag in _CAPTURE_FLAGS:
            if getattr(options, flag) not in (None, False):
                options.usage_error(f"--{flag.replace('_', '-')} needs --capture; give both")
    if options.if_exists != "fail" and (options.capture is None or options.request_id is None):
        options.usage_error("--if-exists needs --id and --capture; give all three")
    if (options.prompt is None) == (options.file is None):
        options.usage_error("give either a prompt or --file FILE")
    if options.file is not None and options.request_id is not None:
        options.usage_error("--id names one request, but --file has many; leave --id out")
    arguments: dict[str, Any] = {
        "capture": _capture(options),
        "steer": steering.operations_of(options),
        "timeout": options.timeout,
        **{name: value for name in (*SAMPLING, "stop") if (value := getattr(options, name)) is not None},
    }
    if options.file is not None:
        return _generate_many(prompts_of(options.file, chat=options.chat), arguments, options, output)
    text = _text_of("-") if options.prompt == "-" else options.prompt
    return _generate_one(_prompt(text, chat=options.chat), arguments, options, output)


def _generate_one(prompt: Prompt, arguments: dict[str, Any], options: argparse.Namespace, output: Output) -> int:
    with open_client(options) as client:
        with client.stream(prompt, request_id=options.request_id, if_exists=options.if_exists, **arguments) as stream:
            request_id, captures = stream.request_id, arguments["capture"] is not None
            rows = f" The rows so far: residuum pull {request_id} --allow-partial" if captures else ""
            with advice_if_cut_off(f"The request {request_id} was aborted.{rows}"):
                for delta in stream:
                    if arguments.get("n", 1) == 1:  # texts of several sequences would interleave
                        output.write(delta.text)
        _show_reply(stream.reply, output)
    return 0


def _generate_many(
    prompts: list[Prompt], arguments: dict[str, Any], options: argparse.Namespace, output: Output
) -> int:
    with open_client(options) as client:
        failed: dict[int, residuum.ResiduumError] = {}
        try:
            replies: list[residuum.Reply | None] = [
                *client.generate_many(prompts, **arguments, progress=not output.as_json)
            ]
        except residuum.BatchFailed as error:
            replies, failed = error.replies, dict(error.errors)
    for number, reply in enumerate(replies):
        if reply is None:
            output.error(f"prompt {number + 1}: {failed[number]}")
        elif output.as_json:
            output.json({"prompt": number + 1, **dataclasses.asdict(reply), "text": reply.text})
        else:
            name = f" {reply.request_id}" if reply.captured else ""
            output.say("\n".join(f"[{number + 1}{name}]{sequence.text}" for sequence in reply.sequences))
    return 1 if failed else 0


def prompts_of(path: str, *, chat: bool) -> list[Prompt]:
    """Return the prompts of a file: one per line, without empty lines.

    Raises:
        InvalidRequest: The file is not UTF-8, or has no prompt.
    """
    prompts = [_prompt(line, chat=chat) for line in _text_of(path).splitlines() if line.strip()]
    if not prompts:
        raise residuum.InvalidRequest(f"{path} has no prompts. Write one prompt per line.")
    return prompts


def _prompt(text: str, *, chat: bool) -> Prompt:
    return [{"role": "user", "content": text}] if chat else text


def _text_of(path: str) -> str:
    """Return the text of a file, or of standard input for "-".

    Raises:
        InvalidRequest: It is not UTF-8.
    """
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else path
        raise residuum.InvalidRequest(
            f"The prompt must be UTF-8, but byte {error.start} of {name} is not: {data[error.start]:#04x}. Convert it "
            "first, for example with iconv."
        ) from None


def _capture(options: argparse.Namespace) -> residuum.Capture | None:
    if options.capture is None:
        return None
    return residuum.Capture(
        layers=options.capture,
        sites="resid_post" if options.sites is None else options.sites,
        positions=options.positions or "all",
        before_steering=options.before_steering,
        encoding=options.encoding or ("project" if options.onto else None),
        dimensions=options.dimensions,
        seed=options.encoding_seed or 0,
        axis=options.axis,
        vectors=steering.load_all(options.onto or []).values(),
        reduction=options.reduction,
        labels=parse_labels(options.label or []),
        keep_prompt=options.keep_prompt,
    )


def _show_reply(reply: residuum.Reply, output: Output) -> None:
    if output.as_json:
        output.json({**dataclasses.asdict(reply), "text": reply.text})
        return
    if len(reply.sequences) > 1:
        output.say("\n".join(f"[{number}]{sequence.text}" for number, sequence in enumerate(reply.sequences)))
    else:
        output.say("")
    if reply.captured:
        # Print to stderr, so that a pipe gets only the text.
        what = "nothing generated, the capture exists" if reply.skipped else "captured"
        print(f"{what}: residuum pull {reply.request_id}", file=sys.stderr)
