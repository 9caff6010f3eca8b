"""What `residuum extract --ray` does: prompts from files, and rows into Parquet files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from pyarrow import fs

from residuum.exceptions import InvalidRequest
from residuum.extraction.inputs.splits import files_of_folder, files_of_split
from residuum.ray.extracting import extract
from residuum.ray.lines import read_json_lines, read_lines
from residuum.ray.service_actor import ServicePlan
from residuum.ray.services import Need, RayServices, running

LOCAL = "local"
"""The address that stands for this machine alone."""

_JSON_SUFFIXES = (".jsonl", ".ndjson")
_SUFFIXES = (*_JSON_SUFFIXES, ".parquet", ".txt")
_SHOWN_ERRORS = 5


class Serving(NamedTuple):
    """The services to start for a job; see `serve`."""

    plan: ServicePlan
    need: Need
    options: Mapping[str, Any]
    """`node_timeout` and `max_restarts`, if they are given."""


class Written(NamedTuple):
    """What was written."""

    rows: int
    """The rows, without those of prompts that failed."""
    failed: int
    """The prompts that failed."""
    errors: list[str]
    """Why some of them failed."""


def extract_files(
    source: str,
    output: str,
    endpoints: list[str],
    *,
    address: str,
    limit: int | None,
    column: str,
    serving: Serving | None = None,
    progress: bool = False,
    **choice: Any,
) -> Written:
    """Send the prompts of files, and write Parquet files.

    Args:
        source: A file that ends in .jsonl, .txt or .parquet, a folder with Parquet files, or a split of one; a path or
            a URL. On a cluster of several nodes, it must be a URL: file:///... for a disk that all nodes have. Splits
            at a URL are not recognised.
        output: The folder to write; likewise a path or a URL. It must be empty, or not exist.
        endpoints: The inference services, if they run already.
        address: The cluster's address, "auto" on one of its nodes, or "local" for this machine.
        limit: The most prompts.
        column: The column with the prompt.
        serving: The services to start for this job; None to use the endpoints.
        progress: Show on stderr how many of them have started.
        choice: The further arguments of `extract`.

    Raises:
        InvalidRequest: The kind of the input is unknown, a folder has several splits or two versions of one, the output
            has files, or one of them is a path and there are several nodes. The other errors are those of `extract`
            and `serve`.
    """
    suffix = _suffix(source)
    _check_empty(output)
    ray.init(
        address=None if address == LOCAL else address, ignore_reinit_error=True, log_to_driver=True,
        logging_level="warning",
    )  # fmt: skip
    nodes = sum(node["Alive"] for node in ray.nodes())
    _check_reach("input", source, nodes)
    _check_reach("output", output, nodes)
    source, output = _absolute(source), _absolute(output)
    prompts = _read(source, suffix, column)
    prompts = prompts if limit is None else prompts.limit(limit)
    if serving is not None:
        if address == LOCAL:  # no nodes come
            serving.need.check_nodes()
        # The checks of the job: the services load their model only for one that can run. Nothing is sent.
        extract(prompts, RayServices((), (), {}), column=column, **choice)
    with contextlib.nullcontext(endpoints) if serving is None else _running(serving, progress=progress) as services:
        rows = extract(prompts, services, column=column, **choice)
        rows.write_parquet(output)
    errors = ray.data.read_parquet(output, columns=["error"])
    failures = errors.filter(lambda row: row["error"] is not None).materialize()
    failed = failures.count()
    return Written(errors.count() - failed, failed, [row["error"] for row in failures.take(_SHOWN_ERRORS)])


def _check_empty(output: str) -> None:
    """Refuse a folder with files: Ray would add the rows to those of an earlier job, so rows would be there twice."""
    try:
        files, path = fs.FileSystem.from_uri(output) if _is_url(output) else (fs.LocalFileSystem(), output)
    except pa.ArrowInvalid:
        return  # a scheme that Arrow does not know: Ray says so, or has a file system for it
    if files.get_file_info(fs.FileSelector(path, allow_not_found=True)):
        raise InvalidRequest(
            f"The folder {output} has files. A job with Ray does not continue, and would add its rows to them. Delete "
            "them, or choose another folder.",
            reason="INVALID_FIELD",
        )


def _running(serving: Serving, *, progress: bool) -> AbstractContextManager[RayServices]:
    return running(serving.plan, serving.need, progress=progress, **serving.options)


def _check_reach(what: str, place: str, nodes: int) -> None:
    """Refuse a path if there are several nodes: each would use its own disk."""
    if nodes > 1 and not _is_url(place):
        raise InvalidRequest(
            f"The {what} {place} is a path, and the cluster has {nodes} nodes, each with its own disk. Give the URL of "
            f"an object storage, such as s3://bucket/{PurePath(place).name}. If all nodes have this disk at the same "
            f"place, give file://{PurePath(_absolute(place)).as_posix()}.",
            reason="INVALID_FIELD",
        )


def _is_url(place: str) -> bool:
    return "://" in place


def _absolute(place: str) -> str:
    """Return a URL as it is, and the absolute path of a file: Ray's workers run in other folders."""
    return place if _is_url(place) else str(Path(place).absolute())


def _suffix(source: str) -> str:
    suffix = PurePath(source).suffix
    if suffix not in {*_SUFFIXES, ""}:
        raise InvalidRequest(
            f"The suffix of {source} names no kind of input that Ray reads. Use {', '.join(_SUFFIXES)}, or a folder "
            "with Parquet files.",
            reason="INVALID_FIELD",
        )
    return suffix


def _input(source: str) -> str | list[str]:
    """Return what Ray reads: a source itself, or the files of a split such as data/train.

    Raises:
        InvalidRequest: The source is a folder on this machine with files of several splits, or of two versions of one.
    """
    path = Path(source)
    if _is_url(source):
        return source
    if path.is_dir():
        files_of_folder(path)  # Ray reads the folder, with its subfolders
    return source if path.exists() else [str(file) for file in files_of_split(path)] or source


def _read(source: str, suffix: str, column: str) -> Any:
    if suffix == ".txt":
        return read_lines(_input(source), column)
    return read_json_lines(_input(source)) if suffix in _JSON_SUFFIXES else ray.data.read_parquet(_input(source))
