"""A manifest as JSON: the contract's own form of the message, and the fields of `vllm_capture`'s manifests beside it.

The two forms have one name in common: `sequences` is an object by number here, as `vllm_capture` has it, and each entry
holds what the message says of the sequence, too. So nothing is lost, and `from_document` finds the message again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from residuum.capture import SITE_NAMES
from residuum.v1 import capture_pb2
from residuum.wire.encodings import (
    BY_DIMENSION,
    ENCODING_NAMES,
    FULL8,
    LARGEST,
    PROJECT,
    RANDOM_PROJECTIONS,
    RAW,
    RP8,
    TOPK8,
    RowFormat,
)
from residuum.wire.selection import is_reduced

_OWN_FIELDS = ("request_id", "tp_rank", "tp_world_size", "mode", "compression")
"""What a document has besides the message."""

_OUTCOME = ("generated_token_ids", "finish_reason")
"""What the message says of a sequence, once the capture is sealed."""

_COUNTS = ("num_rows", "num_bytes")
"""64-bit numbers, which protobuf's JSON writes as texts."""

_QUANTIZED = {FULL8, RP8, TOPK8}


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
        "mode": ENCODING_NAMES.get(what.spec.encoding or RAW, "unknown"),
        "compression": _compression(what.spec),
        **message,
    }


def _compression(spec: capture_pb2.CaptureSpec) -> dict[str, Any]:
    """Return what was done to rows; `rp_k` and `quant_bits` are `vllm_capture`'s own names."""
    encoding, options = spec.encoding, spec.encoding_options
    facts: dict[str, Any] = {}
    if encoding in RANDOM_PROJECTIONS:
        facts |= {"rp_k": options.dimensions, "seed": str(options.seed)}
    if encoding in LARGEST:
        facts["top_k"] = options.dimensions
    if encoding == PROJECT:
        facts["vectors"] = [digest.hex() for digest in options.vectors]
    if encoding in _QUANTIZED:
        facts["quant_bits"] = 8
    if encoding == FULL8:
        facts["quant_axis"] = "dimension" if options.axis == BY_DIMENSION else "row"
    if is_reduced(spec):
        facts["reduction"] = capture_pb2.Reduction.Name(spec.reduction).removeprefix("REDUCTION_").lower()
    return facts


def _width(what: capture_pb2.CaptureDescription) -> int:
    """Return the numbers in a decoded row; those that the model computed, if only a newer version knows."""
    try:
        return RowFormat.of_capture(what).decoded_width
    except ValueError:
        return what.hidden_size


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
    counts = dict.fromkeys(itertools.product(what.spec.layers.list.layers, sites), 0)
    for rows in proto.present:
        if rows.sequence == sequence:
            count = sum(run.last - run.first + 1 for run in rows.positions)
            for layer in rows.layers:
                counts[layer, rows.site] = counts.get((layer, rows.site), 0) + count
    layers: dict[str, Any] = {}
    width = _width(what)
    for (layer, site), count in counts.items():
        shape = [count, width]
        entry = layers.setdefault(str(layer), {"shape": shape, "sites": {}})
        entry["sites"][SITE_NAMES.get(site, f"site {site}")] = shape
    return layers
