"""The adapter to vLLM's first model runner, on fake runners."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from inference_svc.taps.vllm.missing_names import IncompatibleEngineError
from inference_svc.taps.vllm.runners.runner_v1 import attach


class Runner:
    """The part of vLLM's runner that the adapter uses."""

    def __init__(self):
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(8, dtype=np.int32))

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        # At this point vLLM updates the order of rows.
        self.input_batch.req_ids = ["b", "a"]
        self.input_batch.num_computed_tokens_cpu[:3] = [7, 0, 99]
        return scheduler_output, num_scheduled_tokens


def test_rows_are_in_the_order_of_the_batch():
    runner, placed = Runner(), []
    attach(runner, lambda tell: placed.append(tell()), "1.2.3")
    output, counts = SimpleNamespace(), np.array([1, 5])
    assert runner._prepare_inputs(output, num_scheduled_tokens=counts) == (output, counts)
    assert runner._prepare_inputs(output, counts) == (output, counts)
    for rows in placed:
        assert rows.request_ids == ["b", "a"]
        assert (rows.firsts.tolist(), rows.counts.tolist()) == ([7, 0], [1, 5])
    assert len(placed) == 2


def without(name):
    runner = Runner()
    delattr(runner.input_batch, name)
    return runner


class OtherSignature(Runner):
    def _prepare_inputs(self, plan):
        """Another version of vLLM might rename it."""


@pytest.mark.parametrize(
    ("runner", "missing"),
    [
        (without("req_ids"), "input_batch.req_ids"),
        (without("num_computed_tokens_cpu"), "input_batch.num_computed_tokens_cpu"),
        (OtherSignature(), r"_prepare_inputs\(scheduler_output"),
        (SimpleNamespace(), r"_prepare_inputs.* and no input_batch.req_ids and no input_batch.num_computed_tokens_cpu"),
    ],
    ids=["req_ids", "num_computed_tokens_cpu", "signature", "everything"],
)
def test_a_missing_name_is_reported_with_the_version(runner, missing):
    with pytest.raises(IncompatibleEngineError, match=rf"vLLM 9\.8\.7: {type(runner).__name__} has no .*{missing}"):
        attach(runner, print, "9.8.7")
