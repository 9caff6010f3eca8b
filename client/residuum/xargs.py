"""Requests captures and steering from a plain `vllm serve`, through the OpenAI API."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf import json_format

from residuum.exceptions import InvalidRequest
from residuum.protocol.arguments import check_flag
from residuum.protocol.requests import plan_spec
from residuum.values.captures.capture import Capture
from residuum.values.probes.probe import Probe
from residuum.values.probes.rules import Rule
from residuum.values.steering.operation_list import operation_list, steering_spec
from residuum.values.steering.operations import Operation

if TYPE_CHECKING:
    from residuum.protocol.requests import IfExists


def vllm_xargs(
    capture: Capture | None = None,
    steer: Operation | Iterable[Operation] | None = None,
    *,
    request_id: str | None = None,
    if_exists: IfExists = "fail",
    send_vectors: bool = True,
    probes: Probe | Iterable[Probe] | None = None,
    score_prompt: bool = False,
    rules: Rule | Iterable[Rule] | None = None,
    without_operator_rules: bool = False,
) -> dict[str, str | list[str]]:
    """Return the `vllm_xargs` of a request to a `vllm serve` with the taps; see docs/vllm-serve.md.

    Args:
        capture: What to capture; no features of an autoencoder (`sae=`).
        steer: How to steer: one operation, or several in the order in which they apply.
        request_id: The ID of the capture. Default: the `id` of the answer. If a completion has several prompts, "-1",
            "-2" and so on are appended for the second and later ones.
        if_exists: What to do if a capture with this ID exists: "fail", "replace" or "skip"; see `Client.generate`.
        send_vectors: Send the vectors with the request. You may leave them out if the server already has them. It keeps
            vectors until it needs the room for others. If it lacks one, it refuses the request with MISSING_VECTORS.
        probes: Probes. Each choice of the answer, and of its stream, has their scores in a field `residuum`.
        score_prompt: Also score every position of the prompt.
        rules: Rules. Their events are in the same field.
        without_operator_rules: Do without the operator's rules. The server refuses that, unless its operator allows it.

    Raises:
        InvalidRequest: Neither `capture` nor `steer` nor `probes` nor `rules` is given, the capture is of features,
            or an argument is invalid.
        TypeError: An argument has the wrong type.

    Example:
        >>> answer = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none").chat.completions.create(
        ...     model="SmolLM2",
        ...     messages=[{"role": "user", "content": "Tell me about the sea."}],
        ...     extra_body={"vllm_xargs": residuum.vllm_xargs(residuum.Capture(layers="all"))},
        ... )
        >>> acts = client.activations(answer.id)
    """
    if isinstance(capture, Capture) and capture.sae is not None:
        raise InvalidRequest(
            "`vllm serve` captures no features, because it has no call that sends an encoder. Capture them with the "
            "inference service (`residuum serve --sae-mib`), or capture the rows here and encode them yourself: "
            "sae.encode(acts[layer]). ClampFeature works here.",
            reason="INVALID_FIELD",
            metadata={"field": "capture.sae"},
        )
    operations = operation_list(steer)
    steering_spec(operations)  # refuses stored rows, which only clients read
    plan = plan_spec(
        capture, operations, request_id, None,
        if_exists=if_exists, probes=probes, score_prompt=score_prompt, rules=rules,
        without_operator_rules=without_operator_rules,
    )  # fmt: skip
    if not (plan.spec.HasField("capture") or plan.spec.HasField("steering") or plan.spec.HasField("probes")):
        raise InvalidRequest("Give at least one of capture=, steer=, probes= and rules=.", reason="INVALID_FIELD")
    arguments: dict[str, str | list[str]] = {
        "residuum": json_format.MessageToJson(plan.spec, preserving_proto_field_name=True, indent=None)
    }
    if check_flag("send_vectors", send_vectors) and plan.vectors:
        arguments["residuum_vectors"] = [base64.b64encode(vector.message.values).decode() for vector in plan.vectors]
    return arguments
