import json

import pytest

from bench.capture.workload import Job, Mode, Sink, Workload, schedule


def test_rounds_go_forwards_and_backwards_by_turns():
    modes = [Mode.STOCK, Mode.IDLE, Mode.STEER]
    assert [mode for _, mode in schedule(modes, 3)] == [*modes, *modes[::-1], *modes]
    assert [number for number, _ in schedule(modes, 2)] == [0, 0, 0, 1, 1, 1]


def test_prompts_have_the_exact_length_and_no_id_twice():
    prompts = Workload("m", batch_size=5, prefill=40).prompts(0, vocab_size=50)
    assert len(prompts) == 5
    for prompt in prompts:
        assert len(prompt) == len(set(prompt)) == 40
        assert all(0 <= token < 50 for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == 5


def test_prompts_differ_between_iterations_and_are_the_same_in_every_process():
    workload = Workload("m")
    assert workload.prompts(0, 1000) != workload.prompts(1, 1000)
    assert workload.prompts(1, 1000) == Workload("m", eager=True).prompts(1, 1000)


@pytest.mark.parametrize("mode", Mode)
def test_a_job_survives_its_way_to_another_process(mode):
    job = Job(mode, 1, Workload("m", sink=Sink.RING, engine_args={"load_format": "dummy"}), "/tmp/x", "localhost:1")
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_only_a_capture_that_leaves_the_ring_needs_a_store():
    jobs = [Job(mode, 0, Workload("m", sink=sink), "/tmp/x") for mode in Mode for sink in Sink]
    assert [job.mode for job in jobs if job.needs_store] == [Mode.ALL_LAYERS, Mode.ALL_LAYERS_STEER]


def test_the_last_generated_token_has_no_row():
    assert Workload("m", prefill=64, decode=64).rows_per_request == 127
