"""Asking a plain `vllm serve` for captures and steering, through the OpenAI API."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf import json_format

from residuum.exceptions import InvalidRequest
from residuum.protocol.requests import plan_spec
from residuum.values.capture import Capture
from residuum.values.steering import Operation

if TYPE_CHECKING:
    from residuum.protocol.requests import IfExists


def vllm_xargs(
    capture: Capture | None = None,
    steer: Operation | Iterable[Operation] | None = None,
    *,
    request_id: str | None = None,
    if_exists: IfExists = "fail",
    send_vectors: bool = True,
) -> dict[str, str | list[str]]:
    """Return what goes into a request's `vllm_xargs`, for a `vllm serve` that carries the taps (docs/vllm-serve.md).

    Args:
        capture: What is captured.
        steer: How the request is steered.
        request_id: What the capture is called. Default: the `id` of the answer. If a completion has several prompts,
            the captures of the second and later ones are called `id` and "-1", "-2" and so on.
        if_exists: What happens if a capture with this request_id exists: "fail", "replace" or "skip"; see
            `Client.generate`.
        send_vectors: Send the vectors along. A server that was sent them before knows them by their digests, until they
            have to make room for others; without them it refuses the request with MISSING_VECTORS.

    Raises:
        InvalidRequest: It asks for nothing, or for something that can never be meant so.
        TypeError: `capture` is not a Capture, or `steer` holds something else than operations.

    Example:
        >>> answer = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none").chat.completions.create(
        ...     model="SmolLM2",
        ...     messages=[{"role": "user", "content": "Tell me about the sea."}],
        ...     extra_body={"vllm_xargs": residuum.vllm_xargs(residuum.Capture(layers="all"))},
        ... )
        >>> acts = client.activations(answer.id)
    """
    plan = plan_spec(capture, steer, request_id, None, if_exists=if_exists)
    if not (plan.spec.HasField("capture") or plan.spec.HasField("steering")):
        raise InvalidRequest("Give capture=, steer= or both.", reason="INVALID_FIELD")
    arguments: dict[str, str | list[str]] = {
        "residuum": json_format.MessageToJson(plan.spec, preserving_proto_field_name=True, indent=None)
    }
    if plan.vectors and send_vectors:
        arguments["residuum_vectors"] = [base64.b64encode(vector.message.values).decode() for vector in plan.vectors]
    return arguments
