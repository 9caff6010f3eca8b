"""Request plans: the capture and the steering operations of one request, for the workers.

A plan travels in `SamplingParams.extra_args`, which vLLM serialises with msgpack. The worker reads it once, when the
request is first scheduled. Most of a plan is the same for many requests: that part travels as bytes, and both sides
keep it (`SharedPlan`).
"""

from inference_svc.taps.plan.captures import Capture, Places, RowEncoding
from inference_svc.taps.plan.operations import STEERING_KINDS, Gate, Kind, Measure, Operation
from inference_svc.taps.plan.requests import KEY, RequestPlan, ScoreRegion, SharedPlan

__all__ = [
    "KEY",
    "STEERING_KINDS",
    "Capture",
    "Gate",
    "Kind",
    "Measure",
    "Operation",
    "Places",
    "RequestPlan",
    "RowEncoding",
    "ScoreRegion",
    "SharedPlan",
]
