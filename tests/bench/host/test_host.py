import json
from types import SimpleNamespace

import pytest

from bench.host.__main__ import OtherWork, cost_of, line, main
from bench.host.loop import Captures, DecodeLoop, Device, Steering
from residuum.wire.limits import BLOCK_TOKENS


@pytest.mark.parametrize("device", [Device.NONE, Device.HOST])
@pytest.mark.parametrize("steering", Steering)
def test_requests_that_begin_together_fill_as_many_blocks_in_each_step(device, steering):
    loop = DecodeLoop(BLOCK_TOKENS, 2, device=device, steering=steering)
    for _ in range(BLOCK_TOKENS):
        loop.step()
    for _ in range(2 * BLOCK_TOKENS):
        before = loop.sink.sent
        loop.step()
        assert loop.sink.sent == before + 1


def test_batches_take_turns():
    loop = DecodeLoop(2 * BLOCK_TOKENS, 2, batches=2)
    for _ in range(4 * BLOCK_TOKENS):
        loop.step()
    before = loop.sink.sent
    for _ in range(2 * BLOCK_TOKENS):
        loop.step()
    assert loop.sink.sent == before + 2 * BLOCK_TOKENS, "each request has filled one block"


def test_batches_must_be_alike(capsys):
    with pytest.raises(SystemExit):
        main(["--requests", "4,3", "--batches", "2"])
    assert "multiples of --batches" in capsys.readouterr().err


def test_a_step_without_requests_does_nothing():
    loop = DecodeLoop(0, 2)
    loop.step()
    assert loop.sink.sent == 0


def test_requests_that_are_only_steered_send_no_blocks():
    loop = DecodeLoop(3, 2, captures=Captures.NONE, steering=Steering.REQUEST)
    for _ in range(40):
        loop.step()
    assert loop.sink.sent == 0


def test_a_cost_is_reported_for_the_step_and_for_each_request():
    cost = cost_of(4, [8e-6] * 99 + [1.0], captures=Captures.ALL, steering=Steering.SHARED)
    assert (cost.median_us, cost.us_per_request) == pytest.approx((8.0, 2.0))
    assert line(cost) == "4\tall\tshared\t8.0\t8.0\t2.00"
    half = cost_of(8, [8e-6], captures=Captures.ALL, steering=Steering.SHARED, batches=2)
    assert half.us_per_request == pytest.approx(2.0)
    assert cost_of(0, [1e-6], captures=Captures.ALL, steering=Steering.NONE).us_per_request == 0.0


def test_the_result_is_written(tmp_path, capsys):
    main(
        ["--requests", "0,3", "--layers", "2", "--steps", "5", "--device", "host", "--output", str(tmp_path / "x.json")]
    )
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["benchmark"] == "bench.host"
    assert [cost["requests"] for cost in result["costs"]] == [0, 3] * 6
    assert len(capsys.readouterr().out.splitlines()) == 13


def test_other_work_runs_before_each_step_and_is_not_timed(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0, runs=0)

    def run(_self):
        clock.now += 1.0
        clock.runs += 1

    monkeypatch.setattr(OtherWork, "run", run)
    monkeypatch.setattr("bench.host.__main__.time.perf_counter", lambda: clock.now)
    options = "--requests 3 --layers 2 --steps 5 --device host --cold --output"
    main([*options.split(), str(tmp_path / "x")])
    assert clock.runs == 6 * 5
    assert all(cost["p95_us"] == 0 for cost in json.loads((tmp_path / "x").read_text())["costs"])


def test_other_work_touches_more_than_a_core_keeps():
    other = OtherWork()
    other.run()
    assert other._memory[::64].all()
