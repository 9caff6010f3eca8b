"""The commands for captures: `ls`, `pull`, `follow`, `manifest`, `rm` and `abort`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import residuum
from residuum.cli.connection import advice_if_cut_off, open_captures, open_client, plain_warnings, silent_stores
from residuum.cli.generation.steering import POSITIONS_HELP
from residuum.cli.labels import add_where, labels_text
from residuum.cli.output import Output, age
from residuum.cli.parser import positive_count
from residuum.exports.formats import FORMATS
from residuum.exports.target import is_export
from residuum.protocol.captures.deleting import DELETIONS_AT_ONCE
from residuum.protocol.requests import check_capture_id
from residuum.transport.progress import size

_STATES = ("open", "complete", "incomplete", "aborted")
_HOW_TO_CONTINUE = (
    "The captures that were printed are written. The same command continues; leave --force out, if you gave it."
)


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose captures."""
    parser.add_argument("--prefix", default="", help="only captures whose ID starts with this (default: all)")
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        choices=_STATES,
        metavar="STATE",
        help=f"only captures in this state: {', '.join(_STATES)}; may be repeated (default: all)",
    )
    add_where(parser, "only captures whose labels match this", "all")


def _filter_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `client.captures` that the flags of `add_filter` give; empty if none is given."""
    given = {"prefix": options.prefix, "states": options.state, "where": options.where}
    return {name: value for name, value in given.items() if value}


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ls`."""
    add_filter(parser)
    parser.add_argument(
        "-n", "--limit", type=positive_count, default=None, metavar="N", help="at most this many (default: all)"
    )
    parser.add_argument(
        "--by",
        metavar="LABEL",
        help="list how many captures have each value of this label, with their rows and bytes (default: list captures)",
    )


def list_captures(options: argparse.Namespace, output: Output) -> int:
    """List captures. If a store does not answer, list those of the others and return 1."""
    opened = "age" if output.is_terminal else "open_time"
    columns = ["capture_id", "state", "num_rows", "num_bytes", "model", "labels", opened]
    with open_captures(options) as client, silent_stores(output) as silent:
        if isinstance(client, residuum.Client):
            if len(client.store_endpoints()) > 1:
                columns.append("store")
            if client.credentials.has_token and options.tenant is None:  # admins see the captures of all tenants
                columns.append("tenant")
            summaries: Iterator[residuum.CaptureSummary] = client.captures(**_filter_of(options), allow_partial=True)
        else:
            summaries = client.captures(**_filter_of(options))
        if options.by is not None:
            columns = ["value", "captures", "rows", "bytes"]
            output.rows(columns, _totals_by(options.by, itertools.islice(summaries, options.limit), output))
            return 1 if silent else 0
        shown = output.rows(
            columns,
            (_summary_row(item, output) for item in itertools.islice(summaries, options.limit)),
            optional=("model", "labels", "store", "num_rows", "age"),
        )
    if not shown and not silent:
        output.note("no captures" + (" match" if _filter_of(options) else "") + _other_tenants(client))
    return 1 if silent else 0


def _other_tenants(client: residuum.Client | residuum.Archive) -> str:
    """Return which other tenants have captures in an archive, for a list that is empty."""
    others = [] if isinstance(client, residuum.Client) else [name for name in client.tenants if name != client.tenant]
    names = ", ".join(name or "default" for name in others)
    return f"; the archive has captures of the tenants {names}: choose one with --tenant" if others else ""


def _totals_by(label: str, summaries: Iterable[residuum.CaptureSummary], output: Output) -> list[dict[str, Any]]:
    """Return a row for each value of a label, the largest first; captures without it have the value None."""
    totals: dict[Any, list[int]] = {}
    for item in summaries:
        value = item.labels.get(label)
        total = totals.setdefault((type(value), value), [0, 0, 0])
        for at, count in enumerate((1, item.num_rows, item.num_bytes)):
            total[at] += count
    return [
        {"value": value, "captures": captures, "rows": rows, "bytes": size(total) if output.is_terminal else total}
        for (_, value), (captures, rows, total) in sorted(totals.items(), key=lambda item: -item[1][2])
    ]


def _summary_row(summary: residuum.CaptureSummary, output: Output) -> dict[str, Any]:
    row = dataclasses.asdict(summary)
    if not output.as_json:
        row["labels"] = labels_text(summary.labels)
    if output.is_terminal:
        row["num_bytes"] = size(summary.num_bytes)
        opened = summary.open_time
        row["age"] = "" if opened is None else age(datetime.datetime.now(datetime.timezone.utc) - opened)
    return row


def add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pull`."""
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="the capture's ID; or give --prefix, --state or --where to write each complete capture that matches into "
        "a file ID.FORMAT in the folder --out",
    )
    add_filter(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="the file or folder to write (default: ID with the format's suffix, here)"
    )
    parser.add_argument(
        "--format", choices=list(FORMATS), help="the file's format (default: by FILE's suffix, else safetensors)"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace FILE if it exists (default: fail; with --prefix, --state or --where, skip captures whose files "
        "exist, so that the same command continues after an interruption)",
    )
    _add_selection(parser)
    parser.add_argument(
        "--allow-partial", action="store_true", help="write the present rows of an incomplete capture (default: fail)"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="fail if the capture is still open (default: wait until it ends)"
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose rows of a capture."""
    parser.add_argument("--layers", metavar="LAYERS", help="only these layers: 12 or 0,5,10-20 (default: all)")
    parser.add_argument("--sites", metavar="SITES", help="only these sites, separated by commas (default: all)")
    text = f"only these positions: {POSITIONS_HELP} (default: all)"
    parser.add_argument("--positions", metavar="POSITIONS", help=text)


def pull(options: argparse.Namespace, output: Output) -> int:
    """Fetch a capture into a file, or all captures with some labels into files in a folder."""
    chosen = _filter_of(options)
    if bool(options.id) == bool(chosen):
        options.usage_error("give either the ID of a capture, or --prefix, --state or --where")
    if options.id:
        kind = _file_format(options)
        advice = f"Nothing was written. Again: residuum pull {options.id}"
        with open_captures(options) as client, advice_if_cut_off(advice):
            _pull_one(client, options.id, options.out or f"{options.id}.{kind}", kind, options, output)
        return 0
    folder, kind = Path(options.out or "."), options.format or "safetensors"
    with open_captures(options) as client, advice_if_cut_off(_HOW_TO_CONTINUE):
        found = list(client.captures(**chosen))
        if not found:
            output.note("no captures match" + _other_tenants(client))
        # An admin's filter may find captures of another tenant.
        reader = client._for(found) if isinstance(client, residuum.Client) else client  # noqa: SLF001
        folder.mkdir(parents=True, exist_ok=True)
        paths = {item.capture_id: folder / f"{item.capture_id}.{kind}" for item in found}
        there = set() if options.force else {name for name, path in paths.items() if is_export(path)}
        if there:
            output.error(
                f"skipped {len(there)} of {len(found)} captures because of existing files; --force replaces these"
            )
        for item in found:
            if item.capture_id in there:
                continue
            if item.state in {"incomplete", "aborted"} and not options.allow_partial:
                output.error(
                    f"{item.capture_id} is {item.state} and was left out; --allow-partial writes its present rows"
                )
                continue
            _pull_one(reader, item.capture_id, str(paths[item.capture_id]), kind, options, output)
    return 0


def _pull_one(
    client: residuum.Client | residuum.Archive,
    name: str,
    path: str,
    kind: str,
    options: argparse.Namespace,
    output: Output,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", residuum.EmptyCaptureWarning)
        made = client.export(
            name,
            path,
            format=kind,
            layers=options.layers,
            sites=options.sites,
            positions=options.positions,
            wait=not options.no_wait,
            timeout=options.timeout,
            allow_partial=options.allow_partial,
            overwrite=options.force,
            progress=not output.as_json,
        )
    for warning in caught:
        output.error(str(warning.message))
    if output.as_json:
        shape = [len(made.layers), made.num_positions, made.widths[0] if len(made.widths) == 1 else list(made.widths)]
        facts = {"state": made.manifest.state, "shape": shape, "sites": made.sites, "missing_rows": made.num_missing}
        output.json({"path": path, "format": kind, "capture_id": name, **facts})
    else:
        output.say(f"{path}: {made}, {size(made.num_bytes)}")


def _file_format(options: argparse.Namespace) -> str:
    """Return the format: that of --format, else that of the suffix of --out, else safetensors."""
    if options.format or not options.out:
        return options.format or "safetensors"
    suffix = Path(options.out).suffix
    if not suffix:
        return "safetensors"
    if suffix[1:] not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        options.usage_error(f"--out {options.out}: no format has the suffix {suffix!r}; use {known}, or add --format")
    return suffix[1:]


def add_follow_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `follow`."""
    parser.add_argument("id", metavar="ID", help="the capture's ID")
    _add_selection(parser)
    parser.add_argument("--sequence", type=int, default=0, metavar="N", help="the sequence (default: 0)")
    parser.add_argument(
        "--allow-partial", action="store_true", help="do not fail if the capture ends incomplete (default: fail)"
    )


def follow(options: argparse.Namespace, output: Output) -> int:
    """Print a line for each piece of a capture as it arrives, until the capture ends."""
    advice = advice_if_cut_off(f"Again from the start: residuum follow {options.id}")
    with open_client(options) as client, advice, plain_warnings(output):
        pieces = client.follow(
            options.id,
            layers=options.layers,
            sites=options.sites,
            positions=options.positions,
            sequence=options.sequence,
            timeout=options.timeout,
            allow_partial=options.allow_partial,
        )
        for site, layer, positions, rows in pieces:
            norms = np.linalg.norm(rows.astype(np.float64), axis=-1)
            first, last = int(positions[0]), int(positions[-1])
            if output.as_json:
                facts = {"site": site, "layer": layer, "positions": [int(position) for position in positions]}
                output.json({**facts, "norms": norms})
            else:
                output.say(f"{site} layer {layer}: positions {first} to {last}, mean norm {norms.mean():.4g}")
        if not output.as_json:
            output.say(f"{options.id}: {client.manifest(options.id).state}")
    return 0


def add_manifest_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `manifest`."""
    parser.add_argument("id", metavar="ID", help="the capture's ID")
    parser.add_argument(
        "--wait", action="store_true", help="wait until the capture ends, at most --timeout (default: do not wait)"
    )
    parser.add_argument(
        "--archived",
        action="store_true",
        help="wait until it is in the store's archive, too, at most --timeout, and fail if it is not (default: do not)",
    )


def manifest(options: argparse.Namespace, output: Output) -> int:
    """Print a capture's manifest as one JSON document."""
    with open_captures(options) as client, advice_if_cut_off(f"The capture {options.id} is still open."):
        wait = (options.timeout or True) if options.wait or options.archived else False
        if isinstance(client, residuum.Archive):
            found = client.manifest(options.id)
        else:
            found = client.manifest(options.id, wait=wait, archived=options.archived)
    output.json(found.to_dict(), indent=None if output.as_json else 2)
    if options.archived and isinstance(client, residuum.Client) and (why := _why_not_archived(options.id, found)):
        output.error(why)
        return 1
    return 0


def _why_not_archived(capture_id: str, manifest: residuum.Manifest) -> str:
    """Return why a capture is not in the archive, in words; empty if it is."""
    if not manifest.is_final:
        return f"The capture {capture_id} is still open, so it is not in the archive. Give a longer --timeout, or none."
    if manifest.archive_state == "pending":
        return (
            f"The capture {capture_id} is not in the archive yet. `residuum stats` says whether the archive works. "
            "Give a longer --timeout, or none."
        )
    return "" if manifest.archive_state else f"The store of {capture_id} has no archive (--archive)."


_ABOUT_ONE_CAPTURE = (residuum.NotFound, residuum.InvalidRequest, residuum.Unavailable, residuum.DeadlineExceeded)
"""Failures that concern one capture only. Others may be in other stores, so their deletion is still tried."""


def add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rm`."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="a capture's ID")
    add_filter(parser)
    parser.add_argument("--yes", action="store_true", help="delete without asking (default: ask)")


def remove(options: argparse.Namespace, output: Output) -> int:
    """Delete captures. Continue after one that is missing or whose store does not answer, and return 1 at the end."""
    chosen = _filter_of(options)
    if bool(options.ids) == bool(chosen):
        options.usage_error("name captures by ID, or choose them with --prefix, --state and --where")
    with open_client(options) as client:
        if chosen:
            found = list(client.captures(**chosen))
            if not found:
                output.note("no captures match")
                return 0
            deleter = client._for(found)  # noqa: SLF001 - an admin's filter may find captures of another tenant
            if not options.yes and not _agrees(found):
                output.error("nothing was deleted; pass --yes to delete without being asked")
                return 1
            freed: list[int] = []
            show = _show_deleted if output.as_json else lambda _name, count, _output: freed.append(count)
            status = _delete([summary.capture_id for summary in found], deleter, show, output)
            output.say(f"deleted {len(freed):,} capture{'' if len(freed) == 1 else 's'}, {size(sum(freed))} freed")
            return status
        return _delete(options.ids, client, _show_deleted, output)


def _agrees(found: list[residuum.CaptureSummary]) -> bool:
    if not sys.stdin.isatty():
        return False
    what = f"{len(found)} captures, {size(sum(summary.num_bytes for summary in found))}"
    print(f"Delete {what}? [y/N] ", end="", file=sys.stderr, flush=True)  # stdout may be a file
    try:
        return input().strip().lower() in {"y", "yes"}
    except EOFError:  # Ctrl-D
        print(file=sys.stderr)
        return False


def _show_deleted(name: str, freed: int, output: Output) -> None:
    if output.as_json:
        output.json({"capture_id": name, "freed_bytes": freed})
    else:
        output.say(f"{name}: deleted, {size(freed)} freed")


def _delete(
    ids: Iterable[str], client: residuum.Client, show: Callable[[str, int, Output], None], output: Output
) -> int:
    """Delete captures, and show the results in order. Return 1 if one could not be deleted."""
    outcomes: dict[str, int | residuum.ResiduumError] = {}
    valid = []
    for name in dict.fromkeys(ids):
        try:
            valid.append(check_capture_id(name))
        except residuum.InvalidRequest as error:
            outcomes[name] = error
    outcomes |= client._delete_each(valid)  # noqa: SLF001 - `delete` does not say what each capture freed
    failures: dict[residuum.ResiduumError, None] = {}  # one of a store may be that of many captures
    for name, outcome in outcomes.items():
        if isinstance(outcome, residuum.ResiduumError):
            failures[outcome] = None
        else:
            show(name, outcome, output)
    for failure in failures:
        if not isinstance(failure, _ABOUT_ONE_CAPTURE):
            raise failure
        output.error(str(failure))
    return 1 if failures else 0


def add_abort_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `abort`."""
    parser.add_argument("ids", nargs="+", metavar="ID", help="a request's ID")


def abort(options: argparse.Namespace, output: Output) -> int:
    """Stop requests. Continue after one that is unknown, and return 1 at the end."""
    with open_client(options) as client:
        return _for_each(options.ids, client.abort, _show_stopped, output)


def _show_stopped(name: str, _: None, output: Output) -> None:
    if output.as_json:
        output.json({"request_id": name, "running": False})
    else:
        output.say(f"{name}: does not run any more")  # it may have ended before, which the service does not say


def _for_each(
    names: Sequence[str], call: Callable[[str], Any], show: Callable[[str, Any, Output], None], output: Output
) -> int:
    """Call something for each name, several at a time, and show the results in order. Return 1 if a call failed."""
    failed = False

    def outcome(name: str) -> Any:
        try:
            return call(name)
        except _ABOUT_ONE_CAPTURE as error:
            return error

    with ThreadPoolExecutor(DELETIONS_AT_ONCE) as pool:
        try:
            for name, result in zip(names, pool.map(outcome, names), strict=True):
                if isinstance(result, _ABOUT_ONE_CAPTURE):
                    output.error(str(result))
                    failed = True
                else:
                    show(name, result, output)
        except BaseException:  # another failure, or Ctrl-C: begin no more
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return 1 if failed else 0
