"""What `residuum extract --ray` does: prompts from files, and rows into Parquet files."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, NamedTuple

import ray

from residuum.exceptions import InvalidRequest
from residuum.ray.extracting import extract

LOCAL = "local"
"""The address that stands for this machine alone."""

_READERS = {".jsonl": "read_json", ".ndjson": "read_json", ".parquet": "read_parquet", ".txt": "read_text"}
_SHOWN_ERRORS = 5


class Written(NamedTuple):
    """What was written."""

    rows: int
    """The rows, without those of prompts that failed."""
    failed: int
    """The prompts that failed."""
    errors: list[str]
    """Why some of them failed."""


def extract_files(
    source: str, output: str, endpoints: list[str], *, address: str, limit: int | None, column: str, **choice: Any
) -> Written:
    """Send the prompts of files, and write Parquet files.

    Args:
        source: A file that ends in .jsonl, .txt or .parquet, or a folder with Parquet files; a path or a URL.
        output: The folder to write; a path or a URL.
        endpoints: The inference services.
        address: The cluster's address, "auto" on one of its nodes, or "local" for this machine.
        limit: The most prompts.
        column: The column with the prompt.
        choice: The further arguments of `extract`.

    Raises:
        InvalidRequest: The kind of the input is unknown. The other errors are those of `extract`.
    """
    ray.init(
        address=None if address == LOCAL else address, ignore_reinit_error=True, log_to_driver=False,
        logging_level="warning",
    )  # fmt: skip
    prompts = _read(source, column)
    rows = extract(prompts if limit is None else prompts.limit(limit), endpoints, column=column, **choice)
    rows.write_parquet(output)
    errors = ray.data.read_parquet(output, columns=["error"])
    failures = errors.filter(lambda row: row["error"] is not None).materialize()
    failed = failures.count()
    return Written(errors.count() - failed, failed, [row["error"] for row in failures.take(_SHOWN_ERRORS)])


def _read(source: str, column: str) -> Any:
    suffix = PurePath(source).suffix
    if suffix not in {*_READERS, ""}:
        raise InvalidRequest(
            f"The suffix of {source} names no kind of input that Ray reads. Use {', '.join(_READERS)}, or a folder "
            "with Parquet files.",
            reason="INVALID_FIELD",
        )
    reader = _READERS.get(suffix, "read_parquet")
    found = getattr(ray.data, reader)(source, **({"lines": True} if reader == "read_json" else {}))
    return found.rename_columns({"text": column}) if reader == "read_text" and column != "text" else found
