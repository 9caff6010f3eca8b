"""`residuum extract --ray`: the rows of all prompts as Parquet files, computed on a Ray cluster or on this machine."""

from __future__ import annotations

import argparse
from pathlib import PurePath
from typing import Any

import residuum
from residuum.cli.output import Output

LOCAL = "local"

_READERS = {
    ".jsonl": "read_json", ".ndjson": "read_json", ".parquet": "read_parquet", ".txt": "read_text",
}  # fmt: skip

_NOT_WITH_RAY = ("pack", "tokenizer", "export", "dry_run", "keep_captures", "shuffle")
"""Flags that have no effect with Ray, or another one."""


def check(options: argparse.Namespace) -> None:
    """Check that the flags can be used with --ray."""
    for name in _NOT_WITH_RAY:
        if getattr(options, name) not in (None, False):
            options.usage_error(f"--{name.replace('_', '-')} cannot be used with --ray")
    if options.dtype != "stored":
        options.usage_error("--dtype cannot be used with --ray: rows are float32 or the captured dtype")


def extract_with_ray(options: argparse.Namespace, spec: dict[str, Any], connection: Any, output: Output) -> int:
    """Run the prompts with Ray, write Parquet files, and print how many failed."""
    import residuum.ray  # it says what to install

    import ray  # isort: skip - after the check

    ray.init(
        address=None if options.ray == LOCAL else options.ray, ignore_reinit_error=True, log_to_driver=False,
        logging_level="warning",
    )  # fmt: skip
    prompts = _read(str(options.input), options.column)
    if options.limit is not None:
        prompts = prompts.limit(options.limit)
    endpoints = options.endpoint or [connection.endpoint]
    settings = {**connection.settings(), "timeout": options.timeout}
    rows = residuum.ray.extract(
        prompts, endpoints, capture=spec["capture"], column=options.column, keep=options.keep, chat=options.chat,
        steer=spec["steer"], model=options.model, context_length=options.context_length, on_long=options.on_long,
        on_error=options.on_error, max_concurrency=options.max_concurrency, actors=options.actors, **settings,
        **spec["sampling"],
    )  # fmt: skip
    rows.write_parquet(options.output)
    failures = ray.data.read_parquet(options.output, columns=["prompt_sha256", "error"])
    written = failures.count()
    failed = failures.filter(lambda row: row["error"] is not None)
    count = failed.count()
    if output.as_json:
        output.json({"folder": options.output, "rows": written - count, "failed": count})
        return 0
    output.say(f"{options.output}: {written - count} rows, {count} prompts failed")
    for row in failed.take(5):
        output.note(f"a prompt failed: {row['error']}")
    return 0


def _read(source: str, column: str) -> Any:
    """Return the prompts as a dataset. A folder has Parquet files.

    Raises:
        InvalidRequest: The kind of the input is unknown.
    """
    import ray

    suffix = PurePath(source).suffix
    if suffix not in {*_READERS, ""}:
        raise residuum.InvalidRequest(
            f"The suffix of {source} names no kind of input that Ray reads. Use {', '.join(_READERS)}, or a folder "
            "with Parquet files.",
            reason="INVALID_FIELD",
        )
    options = {"lines": True} if _READERS.get(suffix) == "read_json" else {}
    found = getattr(ray.data, _READERS.get(suffix, "read_parquet"))(source, **options)
    return found.rename_columns({"text": column}) if suffix == ".txt" and column != "text" else found
