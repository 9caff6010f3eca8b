"""`residuum extract --ray`: the rows of all prompts as Parquet files, computed on a Ray cluster or on this machine."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from residuum.cli.output import Output
from residuum.cli.parser import positive_count, positive_seconds
from residuum.exceptions import ResiduumError
from residuum.extraction.spec import DEFAULT_SHARD_BYTES

_NOT_WITH_RAY = {
    "pack": False, "separator": "bos", "tokenizer": None, "shuffle": None, "shard_bytes": DEFAULT_SHARD_BYTES,
    "export": None, "dry_run": False, "keep_captures": False,
}  # fmt: skip
"""Flags that have no effect with Ray, or another one, and their defaults."""

_WITH_RAY = {"actors": 1, "batch_size": None}
"""Flags that need --ray, and their defaults."""

_WITH_SERVE = {
    "services": 1, "gpus": 1.0, "serve_flags": "", "python": None, "node_timeout": None, "max_restarts": None,
}  # fmt: skip
"""Flags that need --serve, and their defaults."""


_NOT_WITH_SERVE = dict.fromkeys(("tls", "tls_ca", "tls_server_name", "client_cert", "client_key", "insecure"))
"""Flags of a connection that --serve chooses itself."""


_OTHER_NAMES = {"num_gpus": "gpus"}
"""Flags that have another name than their arguments."""

_OF_RAY = "Failed to apply UDF transform after"
"""The start of what Ray Data adds to the text of an error in an actor."""

_ARGUMENTS = (
    "column", "keep", "chat", "model", "context_length", "on_long", "on_error", "max_concurrency", "batch_size",
    "actors", "store", "tenant", "timeout", "services", "num_gpus", "python", "node_timeout", "max_restarts", "limit",
)  # fmt: skip
"""Arguments that errors may name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a job with Ray."""
    group = parser.add_argument_group("Ray")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="send the prompts with Ray, and write Parquet files to the folder or URL --output: local for this "
        "machine, or a cluster's address, or auto on one of its nodes; such a job does not continue (default: without "
        "Ray)",
    )
    group.add_argument(
        "--actors",
        type=positive_count,
        default=1,
        metavar="N",
        help="with --ray: how many actors send prompts, each to all services; one keeps about four services busy "
        "(default: 1)",
    )
    group.add_argument(
        "--batch-size",
        type=positive_count,
        metavar="N",
        help="with --ray: how many prompts an actor takes at once; it works on two batches at the same time, so it has "
        "at most 2 × N prompts at the services (default: 256)",
    )
    group.add_argument(
        "--serve",
        metavar="MODEL",
        help="with --ray: start inference services of this model for the job, on nodes that have residuum-server; a "
        "folder that all nodes have, or a name on the Hugging Face hub (default: use the services of --endpoint)",
    )
    group.add_argument(
        "--services", type=positive_count, default=1, metavar="N", help="with --serve: how many to start (default: 1)"
    )
    group.add_argument(
        "--gpus",
        type=float,
        default=1.0,
        metavar="N",
        help="with --serve: the GPUs of each service; 0 to serve on CPUs (default: 1)",
    )
    group.add_argument(
        "--serve-flags",
        default="",
        metavar="FLAGS",
        help="with --serve: flags of the inference service as one text, such as '--max-model-len 4096' (default: none)",
    )
    group.add_argument(
        "--python",
        metavar="FILE",
        help="with --serve: the Python that has residuum-server on the nodes (default: that of Ray)",
    )
    group.add_argument(
        "--node-timeout",
        type=positive_seconds,
        metavar="S",
        help="with --serve: seconds to wait until the cluster has a place for all services; give more if it adds nodes "
        "(default: 60)",
    )
    group.add_argument(
        "--max-restarts",
        type=_restarts,
        metavar="N",
        help="with --serve: how often each service may be started again; -1 for no limit (default: 3)",
    )


def check(options: argparse.Namespace) -> None:
    """Check that the flags can be used with --ray, or without it."""
    if not options.serve:
        for name in _given(options, _WITH_SERVE):
            options.usage_error(f"{name} needs --serve")
    if not options.ray:
        if options.serve:
            options.usage_error("--serve needs --ray; without it, start `residuum serve` and use --endpoint")
        for name in _given(options, _WITH_RAY):
            options.usage_error(f"{name} needs --ray")
        return
    for name in _given(options, _NOT_WITH_RAY):
        options.usage_error(f"{name} cannot be used with --ray")
    if options.dtype != "stored":
        options.usage_error("--dtype cannot be used with --ray: rows are float32 or the captured dtype")
    if options.serve:
        _check_serve(options)


def _check_serve(options: argparse.Namespace) -> None:
    """Check that the flags can be used with --serve."""
    if options.endpoint:
        options.usage_error("--serve starts services, and --endpoint names others. Choose one of them.")
    for name in _given(options, _NOT_WITH_SERVE):
        options.usage_error(f"{name} cannot be used with --serve: its services use plain text and a token of the job")


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _restarts(text: str) -> int:
    if text.removeprefix("-").isdecimal() and int(text) >= -1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least -1")


def flag(name: str) -> str:
    """Return the flag with a name."""
    return f"--{name.replace('_', '-')}"


def _given(options: argparse.Namespace, defaults: Mapping[str, object]) -> list[str]:
    """Return the flags whose value is not their default. 0 is not None and not False."""
    values = [(name, getattr(options, name), default) for name, default in defaults.items()]
    return [flag(name) for name, value, default in values if (value, type(value)) != (default, type(default))]


@contextlib.contextmanager
def _flags_in_errors() -> Iterator[None]:
    """Name flags of the command in errors that name arguments of the functions that it calls."""
    try:
        yield
    except ResiduumError as error:
        # Ray wraps the failure of an actor in one with the actor's traceback.
        found = getattr(error, "cause", error)
        found.args = tuple(with_flags(_own(part)) if isinstance(part, str) else part for part in found.args)
        raise found from None


def _own(text: str) -> str:
    """Return an error's text without what Ray adds to it: how often it tried, and its settings for that."""
    return text.partition(_OF_RAY)[0].rstrip()


def with_flags(text: str) -> str:
    """Return a text with flags of the command in place of arguments: `--on-error skip` for `on_error='skip'`."""

    def replaced(found: re.Match[str]) -> str:
        name, value = found[1], found[3]
        return f"{flag(_OTHER_NAMES.get(name, name))}{f' {value}' if value else ''}"

    return re.sub(rf"\b({'|'.join(_ARGUMENTS)})=(['\"]?)([\w.-]*\w)?\2", replaced, text)


def extract_with_ray(options: argparse.Namespace, spec: dict[str, Any], connection: Any, output: Output) -> int:
    """Run the prompts with Ray, write Parquet files, and print how many failed."""
    from residuum.ray.files import extract_files

    settings = {**connection.settings(), "timeout": options.timeout}
    serving = _serving(options, settings) if options.serve else None
    given = _without_none({"batch_size": options.batch_size})
    with _flags_in_errors():
        written = extract_files(
            str(options.input), options.output, options.endpoint or [connection.endpoint],
            address=options.ray, limit=options.limit, column=options.column, keep=options.keep, chat=options.chat,
            capture=spec["capture"], steer=spec["steer"], model=options.model, context_length=options.context_length,
            on_long=options.on_long, on_error=options.on_error or "skip", max_concurrency=options.max_concurrency,
            actors=options.actors, serving=serving, progress=not output.as_json,
            **given, **settings, **spec["sampling"],
        )  # fmt: skip
    if output.as_json:
        output.json({"folder": options.output, **written._asdict()})
        return 0
    output.say(f"{options.output}: {written.rows} rows, {written.failed} prompts failed")
    for error in written.errors:
        output.note(f"a prompt failed: {error}")
    return 0


def _serving(options: argparse.Namespace, settings: dict[str, Any]) -> Any:
    """Return the services to start. What they need of the connection's settings is taken from these."""
    from residuum.ray.files import Serving
    from residuum.ray.services import Need, make_plan

    try:
        flags = shlex.split(options.serve_flags)
    except ValueError as error:
        options.usage_error(f"--serve-flags {options.serve_flags!r} cannot be split into flags: {error}")
    plan = make_plan(
        options.serve, flags, store=settings.pop("store"), token=settings.pop("token"), python=options.python
    )
    further = {name: getattr(options, name) for name in ("node_timeout", "max_restarts")}
    return Serving(plan, Need(options.services, options.gpus, 0.0), _without_none(further))
