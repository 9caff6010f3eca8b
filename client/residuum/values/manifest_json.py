"""A manifest as JSON: the contract's own form of the message, and the fields of `vllm_capture`'s manifests beside it.

The two forms have one name in common: `sequences` is an object by number here, as `vllm_capture` has it, and each entry
holds what the message says of the sequence, too. So nothing is lost, and `from_document` finds the message again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from residuum.v1 import capture_pb2
from residuum.values.capture import SITE_NAMES
from residuum.wire.encodings import BY_DIMENSION, ENCODING_NAMES, RAW, RowFormat
from residuum.wire.selection import is_reduced

_OWN_FIELDS = ("request_id", "tp_rank", "tp_world_size", "mode", "compression")
"""What a document has besides the message."""

_OUTCOME = ("generated_token_ids", "finish_reason")
"""What the message says of a sequence, once the capture is sealed."""

_COUNTS = ("num_rows", "num_bytes")
"""64-bit numbers, which protobuf's JSON writes as texts."""

_PARAMETERS = {"rp": "rp_k", "rp8": "rp_k", "topk": "top_k", "topk8": "top_k", "project": "vectors"}
"""What the numbers in an encoded row are called, after `vllm_capture`'s "rp_k"."""

_QUANT_BITS = 8


def to_document(proto: capture_pb2.CaptureManifest) -> dict[str, Any]:
    """Return a manifest as values that `json.dumps` takes; see `residuum.Manifest.to_dict`."""
    what = proto.description
    message = json_format.MessageToDict(
        proto, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    message.update({name: int(message[name]) for name in _COUNTS})
    message["sequences"] = {
        str(number): _sequence(proto, number) for number in range(max(what.num_sequences, len(proto.sequences)))
    }
    return {
        "request_id": what.capture_id,
        "tp_rank": 0,
        "tp_world_size": max(what.layout.tensor_parallel_size, 1),
        "mode": _mode(what),
        "compression": _compression(what),
        **message,
    }


def from_document(document: Any) -> capture_pb2.CaptureManifest:
    """Return the message of a document, or of the message's own JSON form.

    Raises:
        ValueError: It is neither, as its shape shows.
        ParseError: It is neither.
    """
    if not isinstance(document, Mapping) or "description" not in document:
        raise ValueError("it is no object with a description")
    message = {name: value for name, value in document.items() if name not in _OWN_FIELDS}
    sequences = message.get("sequences")
    if isinstance(sequences, Mapping):
        entries = [sequences[number] for number in sorted(sequences, key=int)]
        message["sequences"] = [
            {name: entry[name] for name in _OUTCOME if name in entry} for entry in entries if "finish_reason" in entry
        ]
    return json_format.ParseDict(message, capture_pb2.CaptureManifest(), ignore_unknown_fields=True)


def _mode(what: capture_pb2.CaptureDescription) -> str:
    return ENCODING_NAMES.get(what.spec.encoding or RAW, "unknown")


def _compression(what: capture_pb2.CaptureDescription) -> dict[str, Any]:
    """Return the encoding's parameters, those of `vllm_capture` under its names."""
    mode, options = _mode(what), what.spec.encoding_options
    parameters: dict[str, Any] = {}
    if mode in _PARAMETERS:
        parameters[_PARAMETERS[mode]] = options.dimensions or len(options.vectors)
    if mode in {"rp", "rp8"}:
        parameters["seed"] = options.seed
    if mode.endswith("8"):
        parameters["quant_bits"] = _QUANT_BITS
    if mode == "full8":
        parameters["axis"] = "dimension" if options.axis == BY_DIMENSION else "row"
    if is_reduced(what.spec):
        parameters["reduction"] = capture_pb2.Reduction.Name(what.spec.reduction).removeprefix("REDUCTION_").lower()
    return parameters


def _width(what: capture_pb2.CaptureDescription) -> int:
    """Return the elements of a row as readers get it."""
    try:
        return RowFormat.of_capture(what).decoded_width
    except ValueError:  # only a newer version knows how its rows are encoded
        return what.hidden_size


def _sequence(proto: capture_pb2.CaptureManifest, number: int) -> dict[str, Any]:
    prompt = len(proto.description.prompt_token_ids)
    entry: dict[str, Any] = {"prompt_len": prompt, "layers": _layers(proto, number)}
    if number < len(proto.sequences):
        outcome = proto.sequences[number]
        entry["total_len"] = prompt + len(outcome.generated_token_ids)
        entry["finish_reason"] = outcome.finish_reason
        entry["generated_token_ids"] = list(outcome.generated_token_ids)
    return entry


def _layers(proto: capture_pb2.CaptureManifest, sequence: int) -> dict[str, Any]:
    """Return the shape of each layer's rows that are there: at each site, and at the first of them."""
    what = proto.description
    sites = list(what.spec.sites) or [capture_pb2.SITE_RESID_POST]
    width = _width(what)
    counts = dict.fromkeys(itertools.product(what.spec.layers.list.layers, sites), 0)
    for rows in proto.present:
        if rows.sequence == sequence:
            count = sum(run.last - run.first + 1 for run in rows.positions)
            for layer in rows.layers:
                counts[layer, rows.site] = counts.get((layer, rows.site), 0) + count
    layers: dict[str, Any] = {}
    for (layer, site), count in counts.items():
        shape = [count, width]
        entry = layers.setdefault(str(layer), {"shape": shape, "sites": {}})
        entry["sites"][SITE_NAMES.get(site, f"site {site}")] = shape
    return layers
