"""What the service does at the moment, from the same numbers as its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residuum.v1 import inference_pb2

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SAMPLES = {
    "residuum_inference_running_requests": "running_requests",
    "residuum_inference_open_captures": "open_captures",
    "residuum_inference_ring_used_bytes": "ring_used_bytes",
    "residuum_inference_ring_wait_seconds_total": "ring_wait_seconds",
    "residuum_inference_ring_losses_total": "ring_losses",
    "residuum_inference_prompt_tokens_total": "prompt_tokens",
    "residuum_inference_generated_tokens_total": "generated_tokens",
    "residuum_inference_shipper_acked_bytes_total": "acknowledged_bytes",
}
"""The field of `ServiceLoad` in which each sample counts. Those of several workers or stores are added up."""


def service_load(registry: CollectorRegistry) -> inference_pb2.ServiceLoad:
    """Return the load that a registry's metrics show. What has no metric is 0."""
    totals = dict.fromkeys(_SAMPLES.values(), 0.0)
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name in _SAMPLES:
                totals[_SAMPLES[sample.name]] += sample.value
    waited = totals.pop("ring_wait_seconds")
    return inference_pb2.ServiceLoad(ring_wait_seconds=waited, **{name: int(value) for name, value in totals.items()})
