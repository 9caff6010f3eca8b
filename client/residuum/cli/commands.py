"""The commands, but for `doctor` and `health`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import residuum
from residuum.cli.output import Output, size
from residuum.directions.files import saved_directions
from residuum.exports.formats import FORMATS
from residuum.values.selections import LayersLike
from residuum.values.steering import Operation
from residuum.values.vector import load_vectors

SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "tokens to generate at most (default: 16)"),
    "temperature": (float, "how freely tokens are chosen, up to 2 (default: 0, greedy)"),
    "top_p": (float, "choose among the most likely tokens of this total probability (default: 1)"),
    "top_k": (int, "choose among so many most likely tokens (default: 0, all)"),
    "seed": (int, "makes what is chosen repeatable (default: it is not)"),
    "min_tokens": (int, "tokens to generate at least (default: 0)"),
    "n": (int, "how many replies to generate, at most 64 (default: 1)"),
}
"""The sampling parameters that are plain numbers, with their help texts."""

CALL_SECONDS = 30.0
"""How long a call may take if the command line does not say."""


def open_client(options: argparse.Namespace) -> residuum.Client:
    """Return a client for the endpoints of a command line."""
    return residuum.Client(
        options.endpoint,
        store=options.store,
        timeout=options.timeout or CALL_SECONDS,
        tenant=options.tenant,
        **credentials_of(options),
    )


def credentials_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the credentials of a command line as the arguments of a client; what it does not name is None.

    Raises:
        BadCredentials: They do not go together.
    """
    files = {
        "ca": options.tls_ca,
        "server_name": options.tls_server_name,
        "cert": options.client_cert,
        "key": options.client_key,
    }
    token = Path(options.token_file) if options.token_file else None
    return {"token": token, "tls": _tls_of(files, options.tls), "insecure": options.insecure}


def _tls_of(
    files: dict[str, str | None],
    flag: bool | None,  # noqa: FBT001 - as argparse has it
) -> residuum.TLS | bool | None:
    if not any(files.values()):
        return flag
    try:
        return residuum.TLS(**files)
    except ValueError as error:
        raise residuum.BadCredentials(str(error)) from None


def info(options: argparse.Namespace, output: Output) -> int:
    """Show what is served."""
    with open_client(options) as client:
        facts = dataclasses.asdict(client.info())
    if output.is_terminal:
        facts["limits"] = {
            name: size(limit) if name.endswith("_bytes") else limit for name, limit in facts["limits"].items()
        }
    output.facts(facts)
    return 0


_WHOLE_STORE = {
    "num_chunks",
    "disk_bytes",
    "max_bytes",
    "used_bytes",
    "append_limit_bytes",
    "free_disk_bytes",
    "retain_seconds",
    "retain_bytes",
    "expired_by_age",
    "expired_by_size",
    "bytes_expired",
}
"""What a store tells of itself to admins alone: for others it is not 0, but not known."""


def stats(options: argparse.Namespace, output: Output) -> int:
    """Show what the stores hold, keep and have deleted: each by itself, and several together as well."""
    with open_client(options) as client, _silent_stores(output) as silent:
        found = client.stats(allow_partial=True)
    for item in [*found, residuum.StoreStats.total(found)] if len(found) > 1 else found:
        facts = dataclasses.asdict(item)
        if item.tenant is not None:
            facts = {name: facts[name] for name in facts if name not in _WHOLE_STORE}
        if output.is_terminal:
            for name in facts:
                if name.endswith("_bytes") and facts[name] is not None:
                    facts[name] = size(facts[name])
        output.facts(facts)
    return 1 if silent else 0


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
]
"""What says more of a capture."""


def generate(options: argparse.Namespace, output: Output) -> int:
    """Generate, printing the text as it is made."""
    if options.capture is None:
        for flag in _CAPTURE_FLAGS:
            if getattr(options, flag) not in (None, False):
                options.usage_error(f"--{flag.replace('_', '-')} says what --capture captures; give both")
    if not options.steer and (options.steer_positions or options.keep_norm):
        options.usage_error("--steer-positions and --keep-norm say how it is steered; give --add or another, too")
    where = {"positions": options.steer_positions, "keep_norm": options.keep_norm}
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    sampling: Any = {name: value for name in (*SAMPLING, "stop") if (value := getattr(options, name)) is not None}
    with open_client(options) as client:
        stream = client.stream(
            [{"role": "user", "content": prompt}] if options.chat else prompt,
            capture=_capture(options),
            steer=[_OPERATIONS[name](text, where) for name, text in options.steer],
            request_id=options.request_id,
            timeout=options.timeout,
            **sampling,
        )
        with stream:
            for delta in stream:
                if sampling.get("n", 1) == 1:  # several would be mixed up
                    output.write(delta.text)
        _show_reply(stream.reply, output)
    return 0


def list_captures(options: argparse.Namespace, output: Output) -> int:
    """List captures; those of stores that answer if others do not, and then fail."""
    columns = ["capture_id", "state", "num_rows", "num_bytes", "model", "open_time"]
    with open_client(options) as client, _silent_stores(output) as silent:
        if len(client.store_endpoints()) > 1:
            columns.append("store")
        if client.credentials.has_token and options.tenant is None:  # for admins, it is everybody's
            columns.append("tenant")
        summaries = client.captures(prefix=options.prefix, states=options.state, allow_partial=True)
        shown = output.rows(
            columns,
            (_summary_row(item, output) for item in itertools.islice(summaries, options.limit)),
            shrink=[name for name in ("model", "open_time", "store") if name in columns],
        )
    if not shown and not silent:
        output.note("no captures" + (" like that" if options.prefix or options.state else ""))
    return 1 if silent else 0


def pull(options: argparse.Namespace, output: Output) -> int:
    """Fetch a capture into a file."""
    kind = _file_format(options)
    path = options.out or f"{options.id}.{kind}"
    with open_client(options) as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", residuum.EmptyCaptureWarning)
        made = client.export(
            options.id,
            path,
            format=kind,
            layers=parse_layers(options.layers) if options.layers else None,
            sites=options.sites,
            wait=not options.no_wait,
            timeout=options.timeout,
            allow_partial=options.allow_partial,
            overwrite=options.force,
            progress=not output.as_json,
        )
    for warning in caught:
        output.note(f"residuum: {warning.message}")
    if output.as_json:
        shape = [len(made.layers), made.num_positions, made.manifest.width]
        facts = {"state": made.manifest.state, "shape": shape, "sites": made.sites, "missing_rows": made.num_missing}
        output.json({"path": path, "format": kind, "capture_id": options.id, **facts})
    else:
        output.say(f"{path}: {made}, {size(made.num_bytes)}")
    return 0


def _file_format(options: argparse.Namespace) -> str:
    """Return the format that the command line names, or the file that it names, or else safetensors."""
    suffix = Path(options.out or "").suffix[1:]
    named: str | None = options.format
    return named or (suffix if suffix in FORMATS else "safetensors")


def manifest(options: argparse.Namespace, output: Output) -> int:
    """Print what is known of a capture, as one JSON document."""
    with open_client(options) as client:
        found = client.manifest(options.id, wait=(options.timeout or True) if options.wait else False)
    print(found.to_json(indent=None if output.as_json else 2))
    return 0


_ABOUT_ONE_CAPTURE = (residuum.NotFound, residuum.InvalidRequest, residuum.Unavailable, residuum.DeadlineExceeded)
"""Failures that say nothing of other captures, which may be in other stores."""


def remove(options: argparse.Namespace, output: Output) -> int:
    """Delete captures; go on after one that is not there, or whose store does not answer, and fail at the end."""
    failed = 0
    with open_client(options) as client:
        for name in options.ids:
            try:
                freed = client.delete(name)
            except _ABOUT_ONE_CAPTURE as error:
                output.error(str(error))
                failed += 1
                continue
            if output.as_json:
                output.json({"capture_id": name, "freed_bytes": freed})
            else:
                output.say(f"{name}: deleted, {size(freed)} freed")
    return 1 if failed else 0


def put_vectors(options: argparse.Namespace, output: Output) -> int:
    """Send the vectors of files that the server lacks."""
    vectors = _load(options.files)
    with open_client(options) as client:
        result = client.put_vectors(vectors.values())
    names = [{"name": name, "digest": vector.hexdigest} for name, vector in vectors.items()]
    if output.as_json:
        output.json({"vectors": names, "sent": result.sent, "bytes_sent": result.bytes_sent})
        return 0
    output.rows(("name", "digest"), names)
    output.say(f"{result.sent} of {len(names)} sent, {size(result.bytes_sent)}")
    return 0


def find_vectors(options: argparse.Namespace, output: Output) -> int:
    """Say which vectors of files the server has; fail if one is missing."""
    vectors = _load(options.files)
    with open_client(options) as client:
        missing = set(client.find_missing_vectors(vectors.values()))
    output.rows(
        ("name", "digest", "present"),
        (
            {"name": name, "digest": vector.hexdigest, "present": vector not in missing}
            for name, vector in vectors.items()
        ),
    )
    return 1 if missing else 0


_LAYER = re.compile(r"[0-9]{1,5}")
"""A layer's number. More digits, and a range would be longer than any model, and than a message may be."""


def parse_layers(text: str) -> LayersLike:
    """Return the layers of a text such as "all", "12" or "0,5,10-20" (both ends included).

    Raises:
        InvalidRequest: It is something else.
    """
    if text == "all":
        return "all"
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _LAYER.fullmatch(first) or (dash and not _LAYER.fullmatch(last)):
            raise residuum.InvalidRequest(f"{text!r} does not name layers; write all, 12 or 0,5,10-20.")
        if dash and int(last) < int(first):
            raise residuum.InvalidRequest(f"{part.strip()!r} counts down and names no layer; write {last}-{first}.")
        layers.extend(range(int(first), int(last or first) + 1))
    return layers


def _capture(options: argparse.Namespace) -> residuum.Capture | None:
    if options.capture is None:
        return None
    return residuum.Capture(
        layers=parse_layers(options.capture),
        sites="resid_post" if options.sites is None else options.sites,
        positions=options.positions or "all",
        before_steering=options.before_steering,
        encoding=options.encoding or ("project" if options.onto else None),
        dimensions=options.dimensions,
        seed=options.encoding_seed or 0,
        axis=options.axis,
        vectors=_load(options.onto or []).values(),
        reduction=options.reduction,
    )


def _scaled(kind: type[residuum.Add | residuum.Ablate], text: str, where: dict[str, Any]) -> Operation:
    place, star, scale = text.rpartition("*")
    vector = _placed(place if star else text)
    try:
        return kind(**vector, **where, scale=float(scale) if star else 1.0)
    except ValueError as error:
        raise residuum.InvalidRequest(f"--{kind.__name__.lower()} {text}: {error}") from None


def _bounds(text: str, where: dict[str, Any]) -> residuum.Cap:
    vector, bounds = _with_numbers(text, 2, f"--cap {text}: write VECTOR@LAYERS:MIN:MAX; one may be left empty.")
    try:
        low, high = (float(bound) if bound else None for bound in bounds)
        return residuum.Cap(**vector, **where, min=low, max=high)
    except ValueError as error:
        raise residuum.InvalidRequest(f"--cap {text}: {error}") from None


def _replacement(text: str, where: dict[str, Any]) -> residuum.Replace:
    vector, (value,) = _with_numbers(text, 1, f"--replace {text}: write VECTOR@LAYERS:VALUE.")
    try:
        return residuum.Replace(**vector, **where, value=float(value))
    except ValueError as error:
        raise residuum.InvalidRequest(f"--replace {text}: {error}") from None


_OPERATIONS: dict[str, Callable[[str, dict[str, Any]], Operation]] = {
    "add": functools.partial(_scaled, residuum.Add),
    "ablate": functools.partial(_scaled, residuum.Ablate),
    "cap": _bounds,
    "replace": _replacement,
}
"""How each kind of steering is read from the command line, given what is said of all of them."""


def _with_numbers(text: str, count: int, advice: str) -> tuple[dict[str, Any], list[str]]:
    """Return the vector, with its layers, and the numbers behind them, of VECTOR@LAYERS:NUMBER..."""
    source, at, rest = text.rpartition("@")
    layers, *numbers = rest.split(":")
    if at and len(numbers) != count:
        raise residuum.InvalidRequest(advice)
    return _placed(f"{source}{at}{layers}"), numbers


def _placed(text: str) -> dict[str, Any]:
    """Return the vector and layers of VECTOR@LAYERS, as the operations take them."""
    source, at, layers = text.rpartition("@")
    if not at:
        raise residuum.InvalidRequest(f"{text!r} does not say where; write VECTOR@LAYERS, such as joy.npy@12.")
    path, colon, name = source.rpartition(":")
    directions = None if colon else saved_directions(source)
    if directions is not None:
        return {"vector": {place: vector for _, place, vector in directions.placed(parse_layers(layers))}}
    vectors = load_vectors(path if colon else source)
    if not colon and len(vectors) == 1:
        return {"vector": next(iter(vectors.values())), "layers": parse_layers(layers)}
    if name not in vectors or not colon:
        raise residuum.InvalidRequest(f"{source}: name one of its vectors: {', '.join(vectors)}.")
    return {"vector": vectors[name], "layers": parse_layers(layers)}


def _load(files: list[str]) -> dict[str, residuum.Vector]:
    return {name: vector for file in files for name, vector in load_vectors(file).items()}


def _show_reply(reply: residuum.Reply, output: Output) -> None:
    if output.as_json:
        output.json({**dataclasses.asdict(reply), "text": reply.text})
        return
    if len(reply.sequences) > 1:
        output.say("\n".join(f"[{number}]{sequence.text}" for number, sequence in enumerate(reply.sequences)))
    else:
        output.say("")
    if reply.captured:
        # On stderr, so that a pipe gets the text alone.
        print(f"captured: residuum pull {reply.request_id}", file=sys.stderr)


@contextlib.contextmanager
def _silent_stores(output: Output) -> Iterator[list[str]]:
    """Give a list that is filled, at the end, with what there is to say of stores that could not be asked; say it."""
    silent: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", residuum.SilentStoreWarning)
        yield silent
        silent += [str(item.message) for item in caught if issubclass(item.category, residuum.SilentStoreWarning)]
    for message in silent:
        output.error(message)


def _summary_row(summary: residuum.CaptureSummary, output: Output) -> dict[str, Any]:
    row = dataclasses.asdict(summary)
    if output.is_terminal:
        row["num_bytes"] = size(summary.num_bytes)
    return row
