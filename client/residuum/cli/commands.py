"""The commands, except `doctor`, `health` and `token`."""

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
from residuum.wire.limits import BLOCK_TOKENS

SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "the most tokens to generate; 0 only computes the prompt (default: 16)"),
    "temperature": (float, "the sampling temperature, up to 2 (default: 0, greedy)"),
    "top_p": (float, "sample from the most likely tokens with this total probability (default: 1)"),
    "top_k": (int, "sample from this many most likely tokens (default: 0, all)"),
    "seed": (int, "the random seed, which makes sampling repeatable (default: none)"),
    "min_tokens": (int, "the fewest tokens to generate (default: 0)"),
    "n": (int, "the number of replies, at most 64 (default: 1)"),
    "min_p": (float, "sample from tokens with at least this fraction of the greatest probability (default: 0)"),
    "presence_penalty": (float, "lower the logits of tokens that the reply has, from -2 to 2 (default: 0)"),
    "frequency_penalty": (float, "lower them for each time that the reply has them, from -2 to 2 (default: 0)"),
    "repetition_penalty": (float, "divide the logits of tokens that prompt or reply have, above 0 (default: 1)"),
    "logprobs": (int, "with --json: give log-probabilities, and this many most likely tokens (default: none)"),
    "prompt_logprobs": (int, "with --json: the same for the prompt's tokens (default: none)"),
    "regex": (str, "make the reply match this regular expression (default: none)"),
}
"""The sampling parameters that are one number or text, with their help texts."""

_OTHER_SAMPLING = ("stop", "stop_token_ids", "bad_words", "logit_bias", "json_schema")
"""The other sampling parameters."""

CALL_SECONDS = 30.0
"""The default timeout of a call."""


def open_client(options: argparse.Namespace) -> residuum.Client:
    """Return a client for the command line's endpoints and credentials."""
    return residuum.Client(
        options.endpoint,
        store=options.store,
        timeout=options.timeout or CALL_SECONDS,
        tenant=options.tenant,
        **credentials_of(options),
    )


def credentials_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the command line's credentials as arguments of a client; None for those not given.

    Raises:
        BadCredentials: The credentials contradict each other.
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
    flag: bool | None,  # noqa: FBT001 - the value of a flag
) -> residuum.TLS | bool | None:
    if not any(files.values()):
        return flag
    try:
        return residuum.TLS(**files)
    except ValueError as error:
        raise residuum.BadCredentials(str(error)) from None


def info(options: argparse.Namespace, output: Output) -> int:
    """Show the served model and the limits."""
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
"""Statistics that a store gives only to admins. For other callers they are unknown, not 0, so they are not shown."""


def stats(options: argparse.Namespace, output: Output) -> int:
    """Show each store's statistics, and their total if there are several stores."""
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
    "flush_interval",
]
"""Flags that need --capture."""


def generate(options: argparse.Namespace, output: Output) -> int:
    """Generate text and print it as it arrives."""
    if options.capture is None:
        for flag in _CAPTURE_FLAGS:
            if getattr(options, flag) not in (None, False):
                options.usage_error(f"--{flag.replace('_', '-')} needs --capture; give both")
    if not options.steer and (options.steer_positions or options.keep_norm):
        options.usage_error(
            "--steer-positions and --keep-norm need --add, --ablate, --cap, --replace or --set; give both"
        )
    where = {"positions": options.steer_positions, "keep_norm": options.keep_norm}
    if not output.as_json and (options.logprobs is not None or options.prompt_logprobs is not None):
        options.usage_error("--logprobs and --prompt-logprobs need --json, which prints them; give both")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    sampling = _sampling(options)
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
                if sampling.get("n", 1) == 1:  # texts of several sequences would interleave
                    output.write(delta.text)
        _show_reply(stream.reply, output)
    return 0


def _sampling(options: argparse.Namespace) -> Any:
    """Return the sampling parameters that were given."""
    names = (*SAMPLING, *_OTHER_SAMPLING)
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
    if "json_schema" in given and not given["json_schema"].lstrip().startswith("{"):
        given["json_schema"] = Path(given["json_schema"]).read_text(encoding="utf-8")
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise residuum.InvalidRequest(f"--logit-bias {text}: use TOKEN_ID:BIAS, such as 504:-2.5.") from None


def list_captures(options: argparse.Namespace, output: Output) -> int:
    """List captures. If a store does not answer, list those of the others and return 1."""
    columns = ["capture_id", "state", "num_rows", "num_bytes", "model", "open_time"]
    with open_client(options) as client, _silent_stores(output) as silent:
        if len(client.store_endpoints()) > 1:
            columns.append("store")
        if client.credentials.has_token and options.tenant is None:  # admins see the captures of all tenants
            columns.append("tenant")
        summaries = client.captures(prefix=options.prefix, states=options.state, allow_partial=True)
        shown = output.rows(
            columns,
            (_summary_row(item, output) for item in itertools.islice(summaries, options.limit)),
            shrink=[name for name in ("model", "open_time", "store") if name in columns],
        )
    if not shown and not silent:
        output.note("no captures" + (" match" if options.prefix or options.state else ""))
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
    """Return the format: that of --format, else that of the suffix of --out, else safetensors."""
    suffix = Path(options.out or "").suffix[1:]
    named: str | None = options.format
    return named or (suffix if suffix in FORMATS else "safetensors")


def manifest(options: argparse.Namespace, output: Output) -> int:
    """Print a capture's manifest as one JSON document."""
    with open_client(options) as client:
        found = client.manifest(options.id, wait=(options.timeout or True) if options.wait else False)
    print(found.to_json(indent=None if output.as_json else 2))
    return 0


_ABOUT_ONE_CAPTURE = (residuum.NotFound, residuum.InvalidRequest, residuum.Unavailable, residuum.DeadlineExceeded)
"""Failures that concern one capture only. Others may be in other stores, so their deletion is still tried."""


def remove(options: argparse.Namespace, output: Output) -> int:
    """Delete captures. Continue after one that is missing or whose store does not answer, and return 1 at the end."""
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
    """Send the files' vectors that the server lacks."""
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
    """Show which of the files' vectors the server has. Return 1 if it lacks one."""
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
"""A layer's number. The digits are limited because a range with more would exceed the size of a message."""


def parse_layers(text: str) -> LayersLike:
    """Return the layers of a text such as "all", "12" or "0,5,10-20" (both ends inclusive).

    Raises:
        InvalidRequest: The text has another form.
    """
    if text == "all":
        return "all"
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _LAYER.fullmatch(first) or (dash and not _LAYER.fullmatch(last)):
            raise residuum.InvalidRequest(f"{text!r} does not name layers; use all, 12 or 0,5,10-20.")
        if dash and int(last) < int(first):
            raise residuum.InvalidRequest(f"{part.strip()!r} counts down and names no layer; use {last}-{first}.")
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
        flush_interval=BLOCK_TOKENS if options.flush_interval is None else options.flush_interval,
    )


def _scaled(kind: type[residuum.Add | residuum.Ablate], text: str, where: dict[str, Any]) -> Operation:
    place, star, scale = text.rpartition("*")
    vector = _placed(place if star else text)
    try:
        return kind(**vector, **where, scale=float(scale) if star else 1.0)
    except ValueError as error:
        raise residuum.InvalidRequest(f"--{kind.__name__.lower()} {text}: {error}") from None


def _bounds(text: str, where: dict[str, Any]) -> residuum.Cap:
    advice = f"--cap {text}: use VECTOR@LAYERS:MIN:MAX; either bound may be left empty."
    vector, bounds = _with_numbers(text, 2, advice)
    try:
        low, high = (float(bound) if bound else None for bound in bounds)
        return residuum.Cap(**vector, **where, min=low, max=high)
    except ValueError as error:
        raise residuum.InvalidRequest(f"--cap {text}: {error}") from None


def _replacement(text: str, where: dict[str, Any]) -> residuum.Replace:
    vector, (value,) = _with_numbers(text, 1, f"--replace {text}: use VECTOR@LAYERS:VALUE.")
    try:
        return residuum.Replace(**vector, **where, value=float(value))
    except ValueError as error:
        raise residuum.InvalidRequest(f"--replace {text}: {error}") from None


_OPERATIONS: dict[str, Callable[[str, dict[str, Any]], Operation]] = {
    "add": functools.partial(_scaled, residuum.Add),
    "ablate": functools.partial(_scaled, residuum.Ablate),
    "cap": _bounds,
    "replace": _replacement,
    "set": lambda text, where: residuum.Set(**_placed(text), **where),
}
"""Parses the argument of each steering flag. The second argument holds the fields that all operations share."""


def _with_numbers(text: str, count: int, advice: str) -> tuple[dict[str, Any], list[str]]:
    """Parse VECTOR@LAYERS:NUMBER... Return the vector with its layers, and the numbers."""
    source, at, rest = text.rpartition("@")
    layers, *numbers = rest.split(":")
    if at and len(numbers) != count:
        raise residuum.InvalidRequest(advice)
    return _placed(f"{source}{at}{layers}"), numbers


def _placed(text: str) -> dict[str, Any]:
    """Parse VECTOR@LAYERS. Return the vector and the layers as keyword arguments of an operation."""
    source, at, layers = text.rpartition("@")
    if not at:
        raise residuum.InvalidRequest(f"{text!r} names no layers; use VECTOR@LAYERS, such as joy.npy@12.")
    path, colon, name = source.rpartition(":")
    directions = None if colon else saved_directions(source)
    if directions is not None:
        return {"vector": {place: vector for _, place, vector in directions.placed(parse_layers(layers))}}
    vectors = load_vectors(path if colon else source)
    if not colon and len(vectors) == 1:
        return {"vector": next(iter(vectors.values())), "layers": parse_layers(layers)}
    if name not in vectors or not colon:
        raise residuum.InvalidRequest(f"{source}: choose one of its vectors: {', '.join(vectors)}.")
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
        # Print to stderr, so that a pipe gets only the text.
        print(f"captured: residuum pull {reply.request_id}", file=sys.stderr)


@contextlib.contextmanager
def _silent_stores(output: Output) -> Iterator[list[str]]:
    """Print the warnings about stores that did not answer. The yielded list holds them once the context has ended."""
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
