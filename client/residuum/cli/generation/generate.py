"""`residuum generate`: text for a prompt or a file of prompts, with capture and steering."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import residuum
from residuum.cli.connection import advice_if_cut_off, open_client, plain_warnings
from residuum.cli.generation import probes, sampling, steering
from residuum.cli.labels import parse_labels
from residuum.cli.output import Output
from residuum.cli.parser import positive_count
from residuum.protocol.requests import IF_EXISTS, Prompt
from residuum.values.captures.capture import AXES, REDUCTIONS
from residuum.values.selections.points import SITES
from residuum.wire.limits import BLOCK_TOKENS
from residuum.wire.rows.encodings import ENCODINGS

EXAMPLES = """\
PROMPT
residuum generate "I love this" --max-tokens 20
residuum generate "I love this" --capture 12 --id joyful
residuum generate "Tell me more" --chat --add joy.safetensors@12*4
residuum generate "Tell me more" --model ADAPTER
residuum generate "Tell me more" --probe question.safetensors
residuum generate "Tell me more" --probe toxic.safetensors --rule toxic:above=0.9,for=3,abort
residuum generate --file prompts.txt --capture all --positions last_prompt
residuum generate --file prompts.txt --capture all --id job --if-exists skip"""

_CAPTURE_FLAGS = [
    "positions",
    "sites",
    "before_steering",
    "encoding",
    "dimensions",
    "encoding_seed",
    "axis",
    "onto",
    "sae",
    "features",
    "reduction",
    "flush_interval",
    "label",
    "keep_prompt",
]
"""Flags that need --capture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="a UTF-8 file with one prompt per line, instead of PROMPT; blank lines are skipped (default: none)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="treat the prompt as a user's message in a chat (default: as plain text)"
    )
    parser.add_argument(
        "--id",
        dest="request_id",
        help="your own ID for the request and its capture; with --file, the requests are ID-0, ID-1 and so on, "
        "without a number for blank lines (default: the server's choice)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the LoRA adapter to use, or the model that you expect; `residuum info` lists both (default: no adapter)",
    )
    parser.add_argument(
        "--if-exists",
        choices=IF_EXISTS,
        default="fail",
        help="if a capture with this ID exists: fail; replace it; or skip, which prints the reply that a complete "
        "capture of the same request holds, and replaces one that is not complete (default: fail)",
    )
    sampling.add_arguments(parser)
    add_capture(parser)
    steering.add_arguments(parser)
    probes.add_arguments(parser)


def add_capture(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what to capture."""
    group = parser.add_argument_group("capture")
    group.add_argument(
        "--capture",
        metavar="LAYERS",
        help="capture these layers: all, 12 or 0,5,10-20; or these points, each a site with its layers: "
        "resid_post.12,mlp_act.3-5 (default: capture nothing)",
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
        help="capture rows before steering changes them (default: after steering)",
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
        help="the dimensions of rp8 and rp, the elements that topk8 and topk keep, or the features that sae keeps "
        "(default: the server's, usually 512, 128 and 32)",
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
        "--sae",
        metavar="PATH",
        help="keep the features of this sparse autoencoder: a folder of SAELens, a params.npz of Gemma Scope, or a "
        "file of residuum.sae.save; --dimensions says how many of each row (default: none)",
    )
    group.add_argument(
        "--features",
        metavar="NUMBERS",
        help="keep these features of the autoencoder, separated by commas (default: the strongest)",
    )
    group.add_argument(
        "--reduction",
        choices=REDUCTIONS,
        metavar="NAME",
        help="capture one row for the prompt and one for the generated tokens, reduced this way: "
        f"{', '.join(REDUCTIONS)} (default: none)",
    )
    group.add_argument(
        "--flush-interval",
        type=int,
        metavar="N",
        help="send the rows of generated tokens after this many captured positions, 1 to 32 (default: 32)",
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
    arguments: dict[str, Any] = {
        "capture": capture_of(options),
        "steer": steering.operations_of(options),
        "model": options.model,
        "timeout": options.timeout,
        **probes.arguments_of(options),
        **sampling.parameters_of(options, output),
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
            show = _printer(stream, arguments, output)
            try:
                with advice_if_cut_off(f"The request {request_id} was aborted.{rows}"):
                    for delta in stream:
                        show(delta)
            except BaseException:
                output.end_line()  # the error has its own line
                raise
        _show_reply(stream.reply, arguments["probes"], output, is_shown=arguments.get("n", 1) == 1)
    return 0


def _printer(
    stream: residuum.Stream, arguments: dict[str, Any], output: Output
) -> Callable[[residuum.TokenDelta], None]:
    """Return the function that prints a delta as it arrives."""
    if output.as_json or arguments.get("n", 1) > 1:  # texts of several sequences would interleave
        return lambda _: None
    if arguments["probes"] and not stream.started.skipped:
        return probes.ScorePrinter(arguments["probes"], stream.started.prompt_token_ids, output).add
    return lambda delta: output.write(delta.text)


def _generate_many(
    prompts: list[Prompt], arguments: dict[str, Any], options: argparse.Namespace, output: Output
) -> int:
    job = options.request_id
    names = None if job is None else [f"{job}-{index}" for index in range(len(prompts))]
    with open_client(options) as client, plain_warnings(output):
        try:
            replies = client.generate_many(
                prompts, request_ids=names, if_exists=options.if_exists, progress=not output.as_json, **arguments
            )
        except residuum.BatchFailed as error:
            _show_replies(error.replies, error.errors, arguments["probes"], output)
            return 1
        except residuum.BatchInterrupted as error:
            _show_replies(error.replies, error.errors, arguments["probes"], output)
            done = sum(reply is not None for reply in error.replies)
            raise KeyboardInterrupt(f"{done} of {len(prompts)} prompts were done. {_rest(options)}") from None
    _show_replies(replies, {}, arguments["probes"], output)
    return 0


def _rest(options: argparse.Namespace) -> str:
    """Return the advice on how to continue with the prompts that an interrupt left."""
    if options.request_id is None or options.capture is None:
        return "To be able to continue after an interrupt, give --capture, --id JOB and --if-exists skip."
    return "To continue, run the same command with --if-exists skip: it generates only what is not complete."


def _show_replies(
    replies: list[residuum.Reply | None] | list[residuum.Reply],
    errors: Mapping[int, Exception],
    watched: Sequence[residuum.Probe],
    output: Output,
) -> None:
    """Print the replies and errors of many prompts in the order of the prompts, without those that have neither."""
    for index, reply in enumerate(replies):
        if index in errors:
            output.error(f"prompt {index + 1}: {errors[index]}")
        elif reply is not None and output.as_json:
            output.json({"prompt": index + 1, **dataclasses.asdict(reply), "text": reply.text})
        elif reply is not None:
            name = f" {reply.request_id}" if reply.captured else ""
            for sequence in reply.sequences:
                output.say(
                    "\n".join((f"[{index + 1}{name}]{sequence.text}", *probes.score_lines(reply, sequence, watched)))
                )
    skipped = sum(reply is not None and reply.skipped for reply in replies)
    if skipped:
        output.note(f"nothing generated for {skipped} of {len(replies)} prompts: their captures exist")


def prompts_of(path: str, *, chat: bool) -> list[Prompt]:
    """Return the prompts of a file: one per line, without blank lines. Lines are those of `residuum extract`.

    A line ends only where a text editor ends it. A prompt may have other characters for which `str.splitlines` ends a
    line, such as U+2028.

    Raises:
        InvalidRequest: The file is not UTF-8, or has no prompt.
    """
    lines = _text_of(path).removeprefix("\ufeff").split("\n")  # a byte order mark is no part of the first prompt
    prompts = [_prompt(line.rstrip("\r"), chat=chat) for line in lines if line.strip()]
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


def capture_of(options: argparse.Namespace) -> residuum.Capture | None:
    """Return what the command line captures; None without --capture."""
    if options.capture is None:
        return None
    what = {"points": options.capture} if _names_points(options.capture) else {"layers": options.capture}
    if options.sites is not None:
        if "points" in what:
            options.usage_error("--capture names points, which have their sites; give no --sites")
        what["sites"] = options.sites
    return residuum.Capture(
        **what,
        positions=options.positions,
        before_steering=options.before_steering,
        encoding=options.encoding or ("project" if options.onto else None),
        dimensions=options.dimensions,
        seed=options.encoding_seed or 0,
        axis=options.axis,
        vectors=[vector for _, vector in steering.load_all(options.onto or [])],
        sae=None if options.sae is None else residuum.sae.load(options.sae),
        features=tuple(_numbers_of("--features", options.features)),
        reduction=options.reduction,
        flush_interval=BLOCK_TOKENS if options.flush_interval is None else options.flush_interval,
        labels=parse_labels(options.label or []),
        keep_prompt=options.keep_prompt,
    )


def _numbers_of(flag: str, text: str | None) -> list[int]:
    """Return the numbers of a text that are separated by commas."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(part.isdecimal() for part in parts):
        raise residuum.InvalidRequest(f"{flag} {text}: give whole numbers, separated by commas.")
    return [int(part) for part in parts]


def _names_points(text: str) -> bool:
    """Tell whether a text names points instead of layers."""
    return "." in text or text.split(",", maxsplit=1)[0].strip() in SITES


def _show_reply(reply: residuum.Reply, watched: Sequence[residuum.Probe], output: Output, *, is_shown: bool) -> None:
    """Print a reply and where its capture is; without the text if that is shown already."""
    if output.as_json:
        output.json({**dataclasses.asdict(reply), "text": reply.text})
        return
    if not is_shown:
        for number, sequence in enumerate(reply.sequences):
            output.say("\n".join((f"[{number}]{sequence.text}", *probes.score_lines(reply, sequence, watched))))
    elif reply.scores is None:
        output.say("")  # ends the line of the text
    if reply.captured:
        # Print to stderr, so that a pipe gets only the text.
        what = "nothing generated, the capture exists" if reply.skipped else "captured"
        print(f"{what}: residuum pull {reply.request_id}", file=sys.stderr)
