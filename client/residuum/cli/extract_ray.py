"""`residuum extract --ray`: the rows of all prompts as Parquet files, computed on a Ray cluster or on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from residuum.cli.output import Output

_NOT_WITH_RAY = ("pack", "tokenizer", "export", "dry_run", "keep_captures", "shuffle")
"""Flags that have no effect with Ray, or another one."""


def check(options: argparse.Namespace) -> None:
    """Check that the flags can be used with --ray."""
    for name in _NOT_WITH_RAY:
        if getattr(options, name) not in {None, False}:
            options.usage_error(f"--{name.replace('_', '-')} cannot be used with --ray")
    if options.dtype != "stored":
        options.usage_error("--dtype cannot be used with --ray: rows are float32 or the captured dtype")


def extract_with_ray(options: argparse.Namespace, spec: dict[str, Any], connection: Any, output: Output) -> int:
    """Run the prompts with Ray, write Parquet files, and print how many failed."""
    from residuum.ray.files import extract_files

    written = extract_files(
        str(options.input), options.output, options.endpoint or [connection.endpoint],
        address=options.ray, limit=options.limit, column=options.column, keep=options.keep, chat=options.chat,
        capture=spec["capture"], steer=spec["steer"], model=options.model, context_length=options.context_length,
        on_long=options.on_long, on_error=options.on_error, max_concurrency=options.max_concurrency,
        actors=options.actors, **{**connection.settings(), "timeout": options.timeout}, **spec["sampling"],
    )  # fmt: skip
    if output.as_json:
        output.json({"folder": options.output, **written._asdict()})
        return 0
    output.say(f"{options.output}: {written.rows} rows, {written.failed} prompts failed")
    for error in written.errors:
        output.note(f"a prompt failed: {error}")
    return 0
