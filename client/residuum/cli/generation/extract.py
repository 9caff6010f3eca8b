"""`residuum extract`: the rows of all prompts of a dataset, as a job that continues after it was killed."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import residuum
from residuum.cli.connection import CALL_SECONDS, credentials_of, plain_warnings
from residuum.cli.generation import extract_ray, sampling, steering
from residuum.cli.generation.generate import add_capture, capture_of
from residuum.cli.output import Output, age, with_flags
from residuum.cli.parser import DEFAULT_ENDPOINT, Parser, positive_count
from residuum.extraction.estimate import Estimate, estimate
from residuum.extraction.job import job_of, run_in_thread
from residuum.extraction.results.exporting import FORMATS, check_export
from residuum.extraction.spec import DEFAULT_SHARD_BYTES
from residuum.transport.progress import size

EXAMPLES = """\
INPUT --output FOLDER
residuum extract train.jsonl --output rows --capture 12 --positions last_prompt --keep label
residuum extract docs.parquet --output rows --capture 8,16,24 --column content --limit 10000 --shuffle 0
residuum extract chats.jsonl --output rows --capture all --column messages --max-tokens 64
residuum extract train.jsonl --output rows --spec job.toml --endpoint a:50051 --endpoint b:50051
residuum extract train.parquet --output s3://bucket/rows --capture 12 --ray auto --endpoint a:50051
residuum extract train.parquet --output s3://bucket/rows --capture 12 --ray auto --serve MODEL --services 8"""

_NOT_IN_A_SPEC = {"spec", "json", "help"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    if isinstance(parser, Parser):
        parser.read_spec = _tokens
    parser.add_argument(
        "input",
        nargs="?",
        metavar="INPUT",
        help="a file that ends in .jsonl, .txt (one prompt per line), .parquet or .arrow, a folder with a dataset, or "
        "a split of one, such as data/train",
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="the folder to write; if it has this job already, the job continues (default: none; it is required)",
    )
    parser.add_argument(
        "--spec",
        metavar="FILE",
        help="a TOML file with flags of this command and their values, such as capture = 12; flags on the command line "
        "take precedence (default: none)",
    )
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--column",
        metavar="NAME",
        default="text",
        help="the column with the prompt: a text, token IDs, or a conversation as a list of messages (default: text)",
    )
    group.add_argument(
        "--keep",
        metavar="NAMES",
        default="",
        help="the columns whose values the rows keep, separated by commas; they are not labels of the captures, which "
        "--label sets (default: none)",
    )
    group.add_argument("--chat", action="store_true", help="treat a text as a user's message (default: as plain text)")
    group.add_argument("--limit", type=positive_count, metavar="N", help="at most this many prompts (default: all)")
    group.add_argument(
        "--shuffle", type=int, metavar="SEED", help="the seed of a random order (default: the input's order)"
    )
    group.add_argument(
        "--context-length", type=positive_count, metavar="N", help="the most tokens of a prompt (default: the model's)"
    )
    group.add_argument(
        "--on-long",
        choices=("fail", "skip", "truncate"),
        default="fail",
        help="what to do with a longer prompt: treat it as an error, leave it out, or use its first tokens; a "
        "conversation cannot be truncated (default: fail)",
    )
    group.add_argument(
        "--pack",
        action="store_true",
        help="join the prompts and cut them into windows of --context-length tokens, for sparse autoencoders; --limit "
        "counts windows (default: no)",
    )
    group.add_argument(
        "--separator",
        type=_token,
        default="bos",
        metavar="TOKEN",
        help="with --pack: the token between documents and at the start of windows: bos, eos, none or a token ID "
        "(default: bos)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="with --pack: the folder of the served model (default: none; the prompts are then lists of token IDs)",
    )
    group.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        help="what to do if a row is broken or its prompt fails: stop, or leave it out and record why (default: stop; "
        "with --ray: skip)",
    )
    _add_job(parser)
    extract_ray.add_arguments(parser)
    add_capture(parser)
    sampling.add_arguments(parser, max_tokens=0, logprobs=False)
    steering.add_arguments(parser)


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    group.add_argument(
        "--model", metavar="NAME", help="the LoRA adapter to use, or the model that you expect (default: no adapter)"
    )
    group.add_argument(
        "--max-concurrency",
        type=positive_count,
        metavar="N",
        help="the most prompts that are sent at once, to all services together; with --ray, by each actor (default: "
        "twice as many as they run)",
    )
    group.add_argument(
        "--dtype",
        choices=("stored", "float32"),
        default="stored",
        help="write rows as they were captured, or as float32 (default: stored)",
    )
    group.add_argument(
        "--shard-bytes",
        type=positive_count,
        default=DEFAULT_SHARD_BYTES,
        metavar="N",
        help=f"the approximate size of a file of rows (default: {DEFAULT_SHARD_BYTES})",
    )
    group.add_argument(
        "--export",
        type=_export,
        action="append",
        metavar="FORMAT:FOLDER",
        help="when the job is complete, also write its rows as datasets:FOLDER (a Hugging Face dataset in the layout "
        "of SAELens' cached activations), parquet:FOLDER, zarr:FOLDER or tar:FOLDER (WebDataset); may be repeated "
        "(default: none)",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="write nothing: run a random sample of the prompts, and estimate the job's bytes and time (default: run)",
    )
    group.add_argument(
        "--keep-captures", action="store_true", help="keep the captures in the stores (default: delete them)"
    )


def extract(options: argparse.Namespace, output: Output) -> int:
    """Run the job, or continue it, and print what it did."""
    source = options.input
    for flag, value in (("INPUT", source), ("--output", options.output), ("--capture", options.capture)):
        if value is None:
            options.usage_error(f"{flag} is missing; give it on the command line or in --spec")
    spec = {
        "capture": capture_of(options),
        "steer": steering.operations_of(options),
        "sampling": sampling.parameters_of(options, output),
        **{name: getattr(options, name) for name in _SPEC_FLAGS},
        "separator": None if options.separator == "none" else options.separator,
    }
    extract_ray.check(options)
    if options.ray:
        return extract_ray.extract_with_ray(options, spec, _Connection(options), output)
    job, clients = job_of(
        _Connection(options), str(source), options.output, spec, options.endpoint or (),
        on_error=options.on_error or "stop", keep_captures=options.keep_captures, timeout=options.timeout,
        max_concurrency=options.max_concurrency, progress=not output.as_json, lines=not output.as_json,
    )  # fmt: skip
    exports = options.export or ()
    targets = {Path(folder).resolve() for _, folder in exports}
    if len(targets) < len(exports):
        options.usage_error("two exports have the same folder; give each --export its own")
    rows_folder = Path(options.output).resolve()
    if targets.intersection((rows_folder, *rows_folder.parents)):
        options.usage_error("an export has the folder of --output, or one above it; give it another folder")
    for name, folder in exports:
        check_export(folder, name, job.spec.keep)
    with plain_warnings(output):
        if options.dry_run:
            _show_estimate(estimate(job, clients), output)
            return 0
        try:
            rows = run_in_thread(job, clients)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("To continue the job, run the same command again") from None
    for name, folder in exports:
        rows.export(folder, name)
    _show(rows, output)
    has_failed = rows.summary is not None and 0 < rows.summary.prompts == rows.summary.failed and not len(rows)
    return int(has_failed)


_SPEC_FLAGS = (
    "column", "keep", "chat", "model", "limit", "shuffle", "context_length", "on_long", "dtype", "shard_bytes",
    "pack", "tokenizer",
)  # fmt: skip


def _token(text: str) -> int | str:
    if text in {"bos", "eos", "none"}:
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither bos, eos, none nor a token ID")


def _export(text: str) -> tuple[str, str]:
    name, _, folder = text.partition(":")
    if name in FORMATS and folder:
        return name, folder
    raise argparse.ArgumentTypeError(f"{text!r} is not of the form FORMAT:FOLDER, with {' or '.join(FORMATS)}")


class _Connection:
    """The connection flags as the client that `job_of` expects."""

    def __init__(self, options: argparse.Namespace) -> None:
        given = options.endpoint or [os.environ.get("RESIDUUM_ENDPOINT", DEFAULT_ENDPOINT)]
        self.endpoint: str = given[0]
        self.settings: Callable[[], dict[str, Any]] = lambda: {
            "store": options.store,
            "timeout": options.timeout or CALL_SECONDS,
            "tenant": options.tenant,
            **credentials_of(options),
        }


def _show_estimate(found: Estimate, output: Output) -> None:
    if output.as_json:
        output.json(found)
        return
    failed = f", {found.failed} of which failed" if found.failed else ""
    time = age(datetime.timedelta(seconds=found.seconds))
    output.say(
        f"{found.prompts} prompts take about {size(found.bytes)} and {time}: {found.tokens} tokens, estimated from "
        f"{found.sampled} prompts{failed}. The disk has {size(found.free_bytes)} free."
    )


def _show(rows: residuum.Extracted, output: Output) -> None:
    summary = rows.summary
    if summary is None:
        return
    if output.as_json:
        output.json({"folder": str(rows.folder), "points": rows.points, **dataclasses.asdict(summary)})
        return
    output.say(f"{rows.folder}: {summary}")
    for line in rows.failures[:5]:
        name = f"prompt {line['index']} failed" if "index" in line else f"document {line['input_row']} was left out"
        output.note(f"{name}: {with_flags(line['failed']['message'])}")
    if len(rows.failures) > 5:  # noqa: PLR2004 - the rest is in the files
        output.note(f"{len(rows.failures)} failed in all; the prompts-*.jsonl files have the reasons")


def _tokens(path: str, repeated: Collection[str]) -> Iterator[str]:
    """Yield the values of a file of --spec as they would be on the command line.

    A list repeats a flag that may be repeated. For another flag, such as --features, it is one value with commas.

    Raises:
        InvalidRequest: A value has no form on the command line.
        OSError: The file cannot be read.
        ValueError: It is not TOML.
        ImportError: Python 3.10 lacks the package tomli.
    """
    if sys.version_info >= (3, 11):
        import tomllib  # novm
    else:
        import tomli as tomllib
    for name, value in tomllib.loads(Path(path).read_text(encoding="utf-8")).items():
        flag = f"--{name.replace('_', '-')}"
        if name in _NOT_IN_A_SPEC or isinstance(value, dict):
            raise residuum.InvalidRequest(f"{name} is not a flag with a value")
        if name == "input":
            yield str(value)
        elif value is True:
            yield flag
        elif value is not False:
            items = value if isinstance(value, list) else [value]
            each = items if flag in repeated else [",".join(map(str, items))]
            yield from (f"{flag}={item}" for item in each)
