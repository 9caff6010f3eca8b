"""The order of the taps' work in a step of vLLM's worker, with a worker and taps that note what is called."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from inference_svc.taps.plan import RequestPlan
from inference_svc.taps.vllm.worker import TappedWorker

STEP = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[], preempted_req_ids=None)


class Worker:
    """vLLM's worker."""

    def __init__(self):
        self.calls = mock.Mock()
        self.calls.execute.return_value = None
        self.calls.sample.return_value = "tokens"
        self._residuum = SimpleNamespace(runtime=self.calls, path=self.calls, is_later_stage=False)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))

    def execute_model(self, scheduler_output):
        return self.calls.execute()

    def sample_tokens(self, grammar_output):
        return self.calls.sample(grammar_output)

    def execute_dummy_batch(self):
        self.calls.dummy()

    def shutdown(self):
        self.calls.shutdown()

    def happened(self):
        names = [name for name, *_ in self.calls.mock_calls]
        self.calls.reset_mock()
        return names


class Tapped(TappedWorker, Worker):
    pass


def test_tokens_come_before_rows_and_scores_before_tokens():
    worker = Tapped()
    for _ in range(2):
        assert worker.execute_model(STEP) is None
        assert worker.sample_tokens("grammar") == "tokens"
        assert worker.happened() == ["begin_step", "execute", "send_scores", "sample", "finish_step"]


def test_a_later_stage_finishes_a_step_when_the_next_begins():
    """The engine need not wait for it, and the stage waits for the one before it anyway."""
    worker = Tapped()
    worker._residuum.is_later_stage = True
    worker.execute_model(STEP)
    assert worker.sample_tokens("grammar") == "tokens"
    assert worker.happened() == ["begin_step", "execute", "send_scores", "sample"]
    worker.calls.execute.return_value = "nothing"  # vLLM's step after the last tokens
    worker.execute_model(STEP)
    assert worker.happened() == ["finish_step", "begin_step", "execute", "send_scores", "finish_step"]


def test_a_run_without_requests_finishes_the_step_before_it():
    worker = Tapped()
    worker._residuum.is_later_stage = True
    worker.execute_model(STEP)
    worker.sample_tokens("grammar")
    worker.happened()
    worker.execute_dummy_batch()
    assert worker.happened() == ["finish_step", "pass_through", "dummy"]


def test_a_step_begins_with_the_plans_of_new_requests():
    worker, plan = Tapped(), RequestPlan(4, name="r#0")
    parameters = (SimpleNamespace(extra_args=plan.to_extra_args()), SimpleNamespace(extra_args=None), None)
    new = [SimpleNamespace(req_id=f"r{at}", sampling_params=each) for at, each in enumerate(parameters)]
    step = SimpleNamespace(finished_req_ids={"old"}, scheduled_new_reqs=new, preempted_req_ids={"late"})
    worker.execute_model(step)
    worker.calls.begin_step.assert_called_once_with({"old"}, [("r0", plan), ("r1", None), ("r2", None)], {"late"})


def test_a_step_without_tokens_is_finished_at_once():
    worker = Tapped()
    worker.calls.execute.return_value = "nothing"
    assert worker.execute_model(STEP) == "nothing"
    assert worker.happened() == ["begin_step", "execute", "send_scores", "finish_step"]


def test_if_the_engine_waits_for_tokens_the_step_is_finished_before():
    worker = Tapped()
    worker.vllm_config.scheduler_config.async_scheduling = False
    worker.execute_model(STEP)
    worker.sample_tokens(None)
    assert worker.happened() == ["begin_step", "execute", "send_scores", "finish_step", "sample"]


def test_a_step_whose_sampling_failed_is_finished_before_the_next():
    """The rows were computed. Usually there is no next step, because the engine ends."""
    worker = Tapped()
    worker.execute_model(STEP)
    worker.calls.sample.side_effect = RuntimeError("the device")
    with pytest.raises(RuntimeError, match="the device"):
        worker.sample_tokens(None)
    assert worker.happened() == ["begin_step", "execute", "send_scores", "sample"]
    worker.execute_model(STEP)
    assert worker.happened()[:2] == ["finish_step", "begin_step"]


def test_a_step_that_failed_is_not_finished():
    worker = Tapped()
    worker.calls.execute.side_effect = RuntimeError("the device")
    with pytest.raises(RuntimeError, match="the device"):
        worker.execute_model(STEP)
    worker.sample_tokens(None)  # vLLM calls it nevertheless
    assert worker.happened() == ["begin_step", "execute", "sample"]


def test_a_step_that_is_not_sampled_is_finished_before_the_next():
    worker = Tapped()
    worker.execute_model(STEP)
    worker.execute_model(STEP)
    assert worker.happened() == [
        "begin_step",
        "execute",
        "send_scores",
        "finish_step",
        "begin_step",
        "execute",
        "send_scores",
    ]


@pytest.mark.parametrize("arrived", [True, False])
def test_a_worker_waits_for_its_rows_before_it_shuts_down(arrived):
    worker = Tapped()
    worker.calls.drain.return_value = arrived
    worker.shutdown()
    assert worker.happened() == ["drain", "shutdown"]


def test_a_worker_shuts_down_even_if_its_rows_cannot_leave_or_it_has_no_taps_yet():
    worker = Tapped()
    worker.calls.drain.side_effect = RuntimeError("the device")
    with pytest.raises(RuntimeError, match="the device"):
        worker.shutdown()
    assert worker.happened() == ["drain", "shutdown"]
    del worker._residuum
    worker.shutdown()
    assert worker.happened() == ["shutdown"]
