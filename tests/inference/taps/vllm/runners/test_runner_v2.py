"""The adapter to vLLM's second model runner, on a fake runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from inference_svc.taps.vllm.missing_names import IncompatibleEngineError
from inference_svc.taps.vllm.runners.runner_v2 import attach


@dataclass
class InputBatch:
    """The fields of vLLM's InputBatch that the adapter reads."""

    req_ids: list[str]
    num_scheduled_tokens: np.ndarray
    num_computed_tokens_np: np.ndarray


class Runner:
    def prepare_inputs(self, scheduler_output: dict[str, int], batch_desc: object) -> InputBatch:
        del batch_desc
        ids = sorted(scheduler_output, key=scheduler_output.__getitem__)  # decodes come before prefills
        counts = np.array([scheduler_output[name] for name in ids])
        return InputBatch(ids, counts, np.arange(len(ids)) * 10)


def test_rows_are_in_the_order_of_the_batch() -> None:
    runner, placed = Runner(), []
    attach(runner, lambda tell: placed.append(tell()), "1.2.3")
    batch = runner.prepare_inputs({"prefill": 7, "decode": 1}, object())
    (rows,) = placed
    assert rows.request_ids == ["decode", "prefill"]
    assert (rows.firsts.tolist(), rows.counts.tolist()) == ([0, 10], [1, 7])
    assert batch.req_ids == ["decode", "prefill"], "the runner gets what it returned"


def test_rows_are_not_computed_unless_they_are_read() -> None:
    runner = Runner()
    attach(runner, lambda tell: None, "1.2.3")
    runner.prepare_inputs({"r": 1}, object())


class Renamed:
    def prepare(self, scheduler_output: object) -> None:
        """Another version of vLLM might rename it."""


def test_a_missing_name_is_reported_with_vllms_version() -> None:
    with pytest.raises(IncompatibleEngineError, match=r"vLLM 9\.8\.7: Renamed has no prepare_inputs"):
        attach(Renamed(), print, "9.8.7")
