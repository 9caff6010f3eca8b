"""What the store is told of a capture at its beginning and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, store_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.engine.facts import ModelFacts
    from inference_svc.requests.registry import Running


def describe_capture(
    facts: ModelFacts, running: Running, token_ids: Sequence[int], num_sequences: int
) -> capture_pb2.CaptureDescription:
    """Return what the store keeps of a request that captures, before its first token."""
    description = capture_pb2.CaptureDescription(
        capture_id=running.request_id,
        tenant=running.tenant,
        model=facts.name,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        dtype=facts.dtype,
        spec=running.spec.capture,
        steering=running.spec.steering,
        prompt_token_ids=token_ids,
        num_sequences=num_sequences,
        layout=capture_pb2.ParallelLayout(
            tensor_parallel_size=facts.tensor_parallel_size, pipeline_parallel_size=facts.pipeline_parallel_size
        ),
        vllm_version=facts.vllm_version,
    )
    description.request_time.GetCurrentTime()
    return description


def aborted_seal(running: Running, sequences: Sequence[capture_pb2.SequenceOutcome]) -> store_pb2.SealCaptureRequest:
    """Return the seal of a capture whose request was broken off."""
    return store_pb2.SealCaptureRequest(
        capture_id=running.request_id,
        tenant=running.tenant,
        sequences=sequences,
        outcome=capture_pb2.CAPTURE_STATE_ABORTED,
    )


def blame(seal: store_pb2.SealCaptureRequest, error: Exception) -> None:
    """Make a seal say that an error ended the request."""
    died = isinstance(error, Failure) and error.reason == Reason.ERROR_REASON_ENGINE_DEAD
    seal.outcome = capture_pb2.CAPTURE_STATE_INCOMPLETE
    seal.incomplete_reason = (
        capture_pb2.INCOMPLETE_REASON_ENGINE_DIED if died else capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED
    )
    # Another text than that of our own failures is for the log: it may hold anything.
    seal.incomplete_detail = error.message if isinstance(error, Failure) else "The engine failed; see its log."
