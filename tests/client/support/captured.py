"""Makes Activations from arrays, as if a client had read them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import residuum
from residuum.v1 import capture_pb2, tensor_pb2
from residuum.values.captures.blocks import Block
from residuum.values.selections.points import SITES

STATES = {
    "open": capture_pb2.CAPTURE_STATE_OPEN,
    "complete": capture_pb2.CAPTURE_STATE_COMPLETE,
    "incomplete": capture_pb2.CAPTURE_STATE_INCOMPLETE,
    "aborted": capture_pb2.CAPTURE_STATE_ABORTED,
}


def activations(
    values, *, layers=None, positions=None, prompt=None, generated=1, sites=("resid_post",), model="tiny", name="req",
    state="complete", present=None, steer=(), before_steering=False, dtype=ml_dtypes.bfloat16, texts=None, spans=None,
    adapter="", changes=(),
):  # fmt: skip
    """Activations of one sequence; `values` [layers, positions, hidden], for each of `sites` times 1, 2, ...

    `texts` are the texts of all tokens; `spans` the (role, first position, number of positions) of each message.
    `changes` are the (first position, operations) of each change of the steering.
    """
    values = np.asarray(values)
    layers = tuple(range(len(values))) if layers is None else tuple(layers)
    positions = np.arange(values.shape[1]) if positions is None else np.asarray(positions)
    prompt = len(positions) if prompt is None else prompt
    what = capture_pb2.CaptureDescription(
        capture_id=name, model=model, adapter=adapter, hidden_size=values.shape[2], num_layers=max(layers) + 1,
        dtype=tensor_pb2.DATA_TYPE_BFLOAT16, prompt_token_ids=range(prompt), num_sequences=1,
    )  # fmt: skip
    what.spec.layers.list.layers.extend(layers)
    what.spec.sites.extend(SITES[site] for site in sites)
    what.spec.before_steering = before_steering
    what.steering.operations.extend(operation.to_proto() for operation in steer)
    manifest = capture_pb2.CaptureManifest(description=what, state=STATES[state])
    if state != "open":
        manifest.sequences.add(generated_token_ids=range(generated), finish_reason="length")
    for first, operations in changes:
        change = manifest.steering_changes.add(first_positions=[first])
        change.steering.operations.extend(operation.to_proto() for operation in operations)
    if texts is not None:
        manifest.prompt_token_texts.CopyFrom(token_texts(texts[:prompt]))
        manifest.sequences[0].token_texts.CopyFrom(token_texts(texts[prompt:]))
    if spans is not None:
        manifest.message_spans.SetInParent()
        for role, first, count in spans:
            manifest.message_spans.spans.add(role=role, first_position=first, num_positions=count)
    there = np.ones(values.shape[:2], dtype=np.bool_) if present is None else np.asarray(present)
    blocks = {
        (0, site): Block(positions, np.where(there[..., None], values * factor, np.nan).astype(dtype), there)
        for factor, site in enumerate(sites, start=1)
    }
    return residuum.Activations(residuum.Manifest.from_proto(manifest), dict.fromkeys(sites, layers), blocks)


def token_texts(texts):
    """The message for the texts of tokens."""
    return capture_pb2.TokenTexts(text="".join(texts), lengths=map(len, texts))
