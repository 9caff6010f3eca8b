"""Manifests as JSON: the protobuf JSON form of the message, merged with the fields of `vllm_capture`'s manifests.

Both forms have a field `sequences`. Here it is an object by sequence number, as in `vllm_capture`, and each entry also
holds the message's fields of that sequence. So nothing is lost, and `from_document` can restore the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from residuum.v1 import capture_pb2
from residuum.values.selections.points import SITE_NAMES
from residuum.wire.rows.encodings import BY_DIMENSION, ENCODING_NAMES, RAW, RowFormat, site_width
from residuum.wire.selection import is_reduced, layers_at

_OWN_FIELDS = ("request_id", "tp_rank", "tp_world_size", "mode", "compression")
"""Fields of a document that the message does not have."""

_OUTCOME = ("generated_token_ids", "finish_reason", "token_texts", "scores")
"""The message's fields of a sequence, once the capture is sealed."""

_COUNTS = ("num_rows", "num_bytes")
"""64-bit numbers, which protobuf's JSON form writes as strings."""

_PARAMETERS = {"rp": "rp_k", "rp8": "rp_k", "topk": "top_k", "topk8": "top_k", "project": "vectors", "sae": "features"}
"""The parameter for the number of dimensions, in the style of `vllm_capture`'s "rp_k"."""

_QUANT_BITS = 8


def to_document(proto: capture_pb2.CaptureManifest) -> dict[str, Any]:
    """Return a manifest as values for `json.dumps`; see `residuum.Manifest.to_dict`."""
    description = proto.description
    message = json_format.MessageToDict(
        proto, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    del message["archive_state"]  # of the store at this moment, not of the capture
    message.update({name: int(message[name]) for name in _COUNTS})
    message["sequences"] = {
        str(number): _sequence(proto, number) for number in range(max(description.num_sequences, len(proto.sequences)))
    }
    return {
        "request_id": description.capture_id,
        "tp_rank": 0,
        "tp_world_size": max(description.layout.tensor_parallel_size, 1),
        "mode": _mode(description),
        "compression": _compression(description),
        **message,
    }


def from_document(document: Any) -> capture_pb2.CaptureManifest:
    """Return the message of a document, or of the message's JSON form.

    Raises:
        ValueError: The document has no `description`, or values of a wrong type.
        ParseError: protobuf cannot parse the document as the message.
    """
    if not isinstance(document, Mapping) or "description" not in document:
        raise ValueError('it is not an object with the key "description"')
    message = {name: value for name, value in document.items() if name not in _OWN_FIELDS}
    sequences = message.get("sequences")
    if isinstance(sequences, Mapping):
        entries = [sequences[number] for number in sorted(sequences, key=int)]
        message["sequences"] = [
            {name: entry[name] for name in _OUTCOME if name in entry} for entry in entries if "finish_reason" in entry
        ]
    return json_format.ParseDict(message, capture_pb2.CaptureManifest(), ignore_unknown_fields=True)


def _mode(description: capture_pb2.CaptureDescription) -> str:
    return ENCODING_NAMES.get(description.spec.encoding or RAW, "unknown")


def _compression(description: capture_pb2.CaptureDescription) -> dict[str, Any]:
    """Return the encoding's parameters, under `vllm_capture`'s names where it has them."""
    mode, options = _mode(description), description.spec.encoding_options
    parameters: dict[str, Any] = {}
    if mode in _PARAMETERS:
        parameters[_PARAMETERS[mode]] = options.dimensions or len(options.vectors)
    if mode in {"rp", "rp8"}:
        parameters["seed"] = options.seed
    if mode.endswith("8"):
        parameters["quant_bits"] = _QUANT_BITS
    if mode == "full8":
        parameters["axis"] = "dimension" if options.axis == BY_DIMENSION else "row"
    if is_reduced(description.spec):
        parameters["reduction"] = (
            capture_pb2.Reduction.Name(description.spec.reduction).removeprefix("REDUCTION_").lower()
        )
    return parameters


def _width(description: capture_pb2.CaptureDescription, site: capture_pb2.Site.ValueType) -> int:
    """Return the number of elements of a decoded row at a site."""
    try:
        return RowFormat.of_capture(description, site).decoded_width
    except ValueError:  # an encoding that this version does not know
        return site_width(description, site)


def _sequence(proto: capture_pb2.CaptureManifest, number: int) -> dict[str, Any]:
    prompt = len(proto.description.prompt_token_ids)
    entry: dict[str, Any] = {"prompt_len": prompt, "layers": _layers(proto, number)}
    if number < len(proto.sequences):
        outcome = proto.sequences[number]
        entry["total_len"] = prompt + len(outcome.generated_token_ids)
        entry["finish_reason"] = outcome.finish_reason
        entry["generated_token_ids"] = list(outcome.generated_token_ids)
        for name in ("token_texts", "scores"):
            if outcome.HasField(name):
                entry[name] = json_format.MessageToDict(
                    getattr(outcome, name), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                )
    return entry


def _layers(proto: capture_pb2.CaptureManifest, sequence: int) -> dict[str, Any]:
    """Return the shape of each layer's present rows: at each site, and for the layer itself that of the first site."""
    description = proto.description
    sites = list(description.spec.sites) or [capture_pb2.SITE_RESID_POST]
    widths = {site: _width(description, site) for site in sites}
    every = {site: set(layers_at(description.spec, site)) for site in sites}
    layers_of_all = description.spec.layers.list.layers
    counts = {(layer, site): 0 for layer in layers_of_all for site in sites if layer in every[site]}
    for rows in proto.present:
        if rows.sequence == sequence:
            count = sum(run.last - run.first + 1 for run in rows.positions)
            for layer in rows.layers:
                counts[layer, rows.site] = counts.get((layer, rows.site), 0) + count
    layers: dict[str, Any] = {}
    for (layer, site), count in counts.items():
        shape = [count, widths.get(site, description.hidden_size)]
        entry = layers.setdefault(str(layer), {"shape": shape, "sites": {}})
        entry["sites"][SITE_NAMES.get(site, f"site {site}")] = shape
    return layers
