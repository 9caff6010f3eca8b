import asyncio
import json
from dataclasses import asdict

import pytest

from bench.capture.__main__ import main
from bench.capture.baton import Baton, BatonDroppedError
from bench.capture.child import capture_of, operations, request_id
from bench.capture.processes import environment_of, run_all
from bench.capture.shapes import SHAPES, write_shape
from bench.capture.subjects import generate_batch
from bench.capture.workload import Job, Mode, Runner, Sink, Vectors, Workload, iterations_per_turn, schedule, turns
from bench.plain import restore
from bench.processes import RunFailedError
from residuum.v1 import capture_pb2
from residuum.wire.ids import is_valid_id
from tests.bench.capture.test_results import make_run

MODES = [Mode.STOCK, Mode.IDLE, Mode.STEER]


def test_rounds_go_forwards_and_backwards_by_turns():
    alone = [(mode,) for mode in MODES]
    assert [turn.modes for turn in schedule(MODES, 3)] == [*alone, *alone[::-1], *alone]
    assert [turn.round for turn in schedule(MODES, 2)] == [0, 0, 0, 1, 1, 1]
    assert {turn.runner for turn in schedule(MODES, 2)} == {Runner.DEFAULT}


def test_all_but_stock_may_share_an_engine():
    stock, tapped = (Mode.STOCK,), (Mode.IDLE, Mode.STEER)
    assert [turn.modes for turn in schedule(MODES, 2, shared=True)] == [stock, tapped, tapped, stock]
    assert [turn.modes for turn in schedule(tapped, 1, shared=True)] == [tapped]
    assert [turn.modes for turn in schedule(stock, 1, shared=True)] == [stock]
    again = (Mode.STOCK_AGAIN,)
    assert [turn.modes for turn in schedule([*MODES, *again], 2, shared=True)] == [
        *(stock, again, tapped),
        *(tapped, again, stock),
    ]


def test_everything_is_run_with_each_model_runner():
    order = schedule([Mode.STOCK, Mode.IDLE], 2, [Runner.V1, Runner.V2])
    assert [(turn.round, turn.runner.value, turn.modes[0].value) for turn in order] == [
        (0, "v1", "stock"),
        (0, "v1", "idle"),
        (0, "v2", "stock"),
        (0, "v2", "idle"),
        (1, "v2", "idle"),
        (1, "v2", "stock"),
        (1, "v1", "idle"),
        (1, "v1", "stock"),
    ]


def test_modes_on_one_engine_take_turns():
    a, b = Mode.IDLE, Mode.STEER
    assert list(turns([a, b], 3)) == [(0, a), (0, b), (1, b), (1, a), (2, a), (2, b)]


@pytest.mark.parametrize(("iterations", "expected"), [(1, 1), (3, 1), (4, 1), (8, 2), (13, 3), (16, 4), (100, 4)])
def test_engines_have_at_least_four_turns_of_up_to_four_iterations(iterations, expected):
    assert iterations_per_turn(iterations) == expected


async def take_turns(baton, iterations, order):
    for number in range(iterations):
        async with baton.turn(number):
            order.append((number, baton.place))
            await asyncio.sleep(0.001)


def batons_in(folder, members):
    batons = [Baton(str(folder / "baton"), place, members) for place in range(members)]
    batons[0].lay_down()
    return batons


async def test_processes_of_a_round_measure_one_at_a_time(tmp_path):
    order = []
    await asyncio.gather(*(take_turns(baton, 3, order) for baton in batons_in(tmp_path, 2)[::-1]))
    assert order == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]


async def test_a_process_alone_waits_for_no_turn():
    order = []
    await take_turns(Baton(), 2, order)
    assert order == [(0, 0), (1, 0)]


async def test_no_process_waits_for_one_that_failed(tmp_path):
    first, second = batons_in(tmp_path, 2)
    waiting = asyncio.ensure_future(take_turns(second, 1, []))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    first.drop()
    with pytest.raises(BatonDroppedError):
        await waiting


async def test_a_process_that_measures_when_another_fails_does_not_wait_for_its_next_turn(tmp_path):
    first, second = batons_in(tmp_path, 2)
    async with first.turn(0):
        second.drop()
    with pytest.raises(BatonDroppedError):
        await asyncio.wait_for(take_turns(first, 2, []), 10)


@pytest.mark.parametrize(("runner", "value"), [(Runner.DEFAULT, "x"), (Runner.V1, "0"), (Runner.V2, "1")])
def test_the_model_runner_is_chosen_by_the_environment(runner, value, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "x")
    monkeypatch.setenv("RESIDUUM_MODEL", "another")
    environment = environment_of(tmp_path, runner)
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == value
    assert not environment.keys() & {"RESIDUUM_MODEL", "VLLM_BATCH_INVARIANT"}


def test_the_batch_invariant_mode_is_chosen_by_the_environment(tmp_path):
    assert environment_of(tmp_path, Runner.BATCH_INVARIANT)["VLLM_BATCH_INVARIANT"] == "1"


def test_each_request_has_a_vector_or_each_layer_has():
    def steps(vectors, index):
        return [(operation.row, operation.layers) for operation in operations(vectors, index, 3)]

    assert steps(Vectors.REQUEST, 5) == [(5, (0, 1, 2))]
    assert steps(Vectors.LAYER, 5) == [(0, (0,)), (1, (1,)), (2, (2,))]


def test_a_capture_has_its_layers_at_the_sites_in_the_contracts_order():
    capture = capture_of("c", [0, 1, 2], ("mlp_out", "resid_post"))
    assert capture.layers == (0, 1, 2)
    assert capture.sites == (capture_pb2.SITE_RESID_POST, capture_pb2.SITE_MLP_OUT)
    assert capture.units == 6


def test_no_two_requests_have_the_same_id_and_a_store_takes_each():
    ids = [request_id(mode, number, index) for mode in Mode for number in range(3) for index in range(3)]
    assert len(set(ids)) == len(ids)
    assert all(map(is_valid_id, ids))


def test_a_shape_is_a_model_without_weights(tmp_path):
    for name, shape in SHAPES.items():
        folder = write_shape(name, tmp_path)
        assert folder == write_shape(name, tmp_path)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["config.json"]
        assert json.loads((tmp_path / name / "config.json").read_text()) == shape.config
        assert shape.engine_args["load_format"] == "dummy"


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
def test_a_job_survives_json(mode):
    workload = Workload(
        "m",
        sink=Sink.RING,
        vectors=Vectors.LAYER,
        capture_sites=("resid_pre", "mlp_out"),
        fold_norms=False,
        engine_args={"load_format": "dummy"},
    )
    job = Job((mode, Mode.IDLE), 1, workload, "/tmp/x", Runner.V2, ("a=localhost:1",))
    assert restore(Job, json.loads(json.dumps(asdict(job)))) == job


def test_only_a_capture_that_leaves_the_ring_needs_a_store():
    jobs = [Job((Mode.IDLE, mode), 0, Workload("m", sink=sink), "/tmp/x") for mode in Mode for sink in Sink]
    assert [job.modes[1] for job in jobs if job.needs_store] == [
        Mode.ALL_LAYERS,
        Mode.ALL_LAYERS_STEER,
        Mode.ALL_LAYERS_ENCODED,
        Mode.CUSTOM,
    ]


def test_the_last_generated_token_has_no_row():
    assert Workload("m", prefill=64, decode=64).rows_per_request == 127


def test_a_mode_captures_its_layers():
    workload = Workload("m", layers=(1, 5))
    assert workload.captured_layers(Mode.CUSTOM, 9) == (1, 5)
    assert workload.captured_layers(Mode.ALL_LAYERS, 3) == (0, 1, 2)
    assert workload.captured_layers(Mode.IDLE, 3) == ()


def test_if_one_process_of_a_round_fails_the_others_end(monkeypatch):
    def run_turn(turn, workload, store_folder, *, baton):
        if turn.modes == (Mode.STOCK,):
            raise RunFailedError("stock: ended with code 1", "")
        asyncio.run(take_turns(baton, 1, []))

    monkeypatch.setattr("bench.capture.processes.run_turn", run_turn)
    with pytest.raises(RunFailedError):
        run_all(Workload(model="x"), schedule(MODES, 1, shared=True), together=True)


def test_each_round_ends_with_all_measurements_so_far(monkeypatch):
    def run_turn(turn, workload, store_folder, **_):
        return [make_run(mode, turn.round, [1.0]) for mode in turn.modes]

    monkeypatch.setattr("bench.capture.processes.run_turn", run_turn)
    seen = []
    for together in (False, True):
        runs = run_all(
            Workload(model="x"), schedule(MODES, 2, shared=together), together=together,
            after_round=lambda runs: seen.append(len(runs)),
        )  # fmt: skip
        assert sorted((run.round, run.mode) for run in runs) == sorted((at, mode) for at in (0, 1) for mode in MODES)
    assert seen == [3, 6, 3, 6]


def test_a_round_that_fails_leaves_the_result_of_those_before(monkeypatch, tmp_path):
    def run_turn(turn, workload, store_folder, **_):
        if turn.round == 1:
            raise RunFailedError("stock: ended with code 1", "")
        return [make_run(mode, turn.round, [1.0]) for mode in turn.modes]

    monkeypatch.setattr("bench.capture.processes.run_turn", run_turn)
    file = tmp_path / "result.json"
    with pytest.raises(SystemExit):
        main(["--model", "m", "--modes", "stock,stock", "--rounds", "2", "--output", str(file)])
    written = json.loads(file.read_text())
    assert (written["rounds"], len(written["runs"])) == (1, 2)


def test_without_together_only_one_process_runs_at_a_time(monkeypatch):
    alone = []
    monkeypatch.setattr("bench.capture.processes.run_turn", lambda turn, *_, baton=None: alone.append(baton) or [])
    run_all(Workload(model="x"), schedule([Mode.STOCK, Mode.STOCK], 1))
    assert alone == [None, None]


class HeldSubject:
    """An engine that notes what happens, and answers when it is released."""

    def __init__(self):
        self.happened, self.came, self.released = [], asyncio.Semaphore(0), asyncio.Event()

    async def hold(self):
        self.happened.append("hold")

    async def release(self, requests):
        for _ in range(requests):
            await self.came.acquire()
        self.happened.append("release")
        self.released.set()
        return 5.0

    async def generate(self, request_id, prompt, sampling, plan, on_first):
        self.happened.append("request")
        self.came.release()
        if "hold" in self.happened:
            await self.released.wait()
        on_first()
        return [1, 2]


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_engine_begins_with_all_requests_if_that_is_asked_for(at_once):
    subject, prompts = HeldSubject(), {name: [1] for name in "abc"}
    batch = await generate_batch(subject, prompts, dict.fromkeys(prompts), 2, at_once=at_once)
    assert subject.happened == (["hold", *["request"] * 3, "release"] if at_once else ["request"] * 3)
    assert batch.replies == [[1, 2]] * 3
    assert (batch.started == 5.0) is at_once
