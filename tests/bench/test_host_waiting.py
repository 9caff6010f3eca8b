import json

import pytest

from bench.host import serving
from bench.host.loop import Device
from bench.host.serving import Batch, Load, Worker
from bench.host.waiting import main

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
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        monkeypatch.setattr(serving.streamed_sink, "TOGETHER_BYTES", worker.producer.ring_bytes)
        run(worker, ships=True)
        worker.drain()
        assert worker.producer.stats().waits > 0


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
