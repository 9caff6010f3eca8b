import json
import threading
from contextlib import suppress

import pytest

from bench.host import serving
from bench.host.loop import Device
from bench.host.serving import Batch, Load, Worker
from bench.host.waiting import main
from inference_svc.taps.plan import Capture
from residuum.v1 import selection_pb2
from tests.waiting import wait_for

LOAD = Load(requests=8, prompt_tokens=40, new_tokens=64, layers=2, sites=2)


def run(worker, *, ships, steps=150):
    batch = Batch(worker, ships=ships)
    for _ in range(steps):
        batch.prepare()
        batch.finish()
    batch.end()


def test_every_block_goes_through_the_ring_and_comes_back(tmp_path):
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        run(worker, ships=True)
        worker.drain()
        stats = worker.producer.stats()
        requests = 150 * 8 // 65
        assert stats.published == stats.freed >= 3 * requests
        assert stats.losses == 0
        assert worker.pool.free_rows == len(worker.pool.memory)


def test_blocks_of_idle_threads_do_not_reach_the_ring(tmp_path):
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        run(worker, ships=False)
        assert worker.producer.stats().published == 0


@pytest.mark.parametrize("blocks", [2, 3])
def test_blocks_that_leave_together_do_not_wait_for_each_others_room(tmp_path, monkeypatch, blocks):
    """A full ring gets room only from published extents, so the sink must publish before it waits for room."""
    monkeypatch.setattr(serving, "_RING_ROWS", blocks * 4 * 64)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker, monkeypatch.context() as patch:
        patch.setattr(serving.streamed_sink, "TOGETHER_BYTES", worker.producer.ring_bytes)
        run(worker, ships=True)
        worker.drain()
        assert worker.producer.stats().waits > 0


def test_a_pause_of_the_sink_ends_when_a_step_needs_blocks_or_all_are_to_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(serving.streamed_sink, "SHORT_PAUSE_SECONDS", 1000.0)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        run(worker, ships=True)  # more blocks than the pool has room for
        worker.drain()
        assert worker.pool.free_rows == len(worker.pool.memory)


@pytest.fixture
def groups(monkeypatch):
    """How many blocks left together, group by group."""
    found = []
    publish = serving.streamed_sink.StreamedSink._publish
    monkeypatch.setattr(
        serving.streamed_sink.StreamedSink,
        "_publish",
        lambda sink, copies: (publish(sink, copies), found.append(len(copies))),
    )
    return found


def send(worker, positions, *, may_gather=False):
    """Send a block of up to 32 positions."""
    block = worker.pool.take(Capture("a", 0, (0, 1), selection_pb2.PositionSelection()), 1)
    block.positions.extend(positions)
    block.may_gather = may_gather
    worker.sink.send([block])


def test_blocks_that_come_in_a_pause_leave_together(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(serving.streamed_sink, "SHORT_PAUSE_SECONDS", 1000.0)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        send(worker, [0])
        wait_for(lambda: groups == [1], "the first block, which finds the sink idle")
        for position in range(1, 5):
            send(worker, [position])
        worker.drain()
        assert groups == [1, 4]


@pytest.mark.parametrize(
    ("positions", "may_gather"),
    [(range(96, 97), True), (range(96, 128), False)],
    ids=["the end of a reply", "a prompt, or rows that are asked for at once"],
)
def test_blocks_of_a_reply_wait_until_something_urgent_comes(tmp_path, monkeypatch, groups, positions, may_gather):
    monkeypatch.setattr(serving.streamed_sink, "PAUSE_SECONDS", 1000.0)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        send(worker, range(32), may_gather=True)
        wait_for(lambda: groups == [1], "the first block, which finds the sink idle")
        send(worker, range(32, 64), may_gather=True)
        send(worker, range(64, 96), may_gather=True)
        wait_for(lambda: worker.sink._gathers, "the pause for such blocks")
        assert groups == [1]
        send(worker, positions, may_gather=may_gather)
        wait_for(lambda: groups == [1, 3], "all of them")
        worker.drain()


def test_rows_that_cannot_be_sent_are_not_reported_as_sent(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("scripted")

    with suppress(TimeoutError), Worker.running(LOAD, Device.HOST, tmp_path) as worker:  # the context drains, too
        monkeypatch.setattr(worker.sink._writer, "publish", fail)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        send(worker, [0])
        wait_for(lambda: worker.sink._failed, "the end of the thread")
        assert not worker.sink.flush(1000.0)


def test_the_result_is_written(tmp_path, capsys):
    flags = "--requests 4 --prompt-tokens 20 --new-tokens 8 --layers 2 --sites 2 --step-ms 1 --calls 10 --steps 20 "
    flags += "--rounds 2 --switch-us 50,5000 --device host --c-calls"
    path = tmp_path / "x.json"
    main([*flags.split(), "--output", str(path)])
    result = json.loads(path.read_text())
    assert result["benchmark"] == "bench.host.waiting"
    kinds = [(found["threads"], found["switch_us"]) for found in result["rounds"]]
    assert kinds == [("idle", 50), ("working", 50), ("idle", 5000), ("working", 5000)] * 2
    assert all((found["blocks"] > 0) == (found["threads"] == "working") for found in result["rounds"])
    assert result["c_calls"]
    assert capsys.readouterr().out.splitlines()[-5].startswith("threads\t")
