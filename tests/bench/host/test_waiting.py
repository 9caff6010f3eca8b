import json
import random
from collections import defaultdict
from contextlib import suppress

import pytest

from bench.host import serving
from bench.host.loop import Device
from bench.host.serving import Batch, Load, Worker
from bench.host.waiting import main
from inference_svc.shipping.worker import producer
from inference_svc.taps.blocks import PoolExhaustedError
from inference_svc.taps.gpu.encoder import GpuEncoder
from inference_svc.taps.plan import Capture, RowEncoding
from residuum.v1 import capture_pb2, selection_pb2
from tests.waiting import wait_for

LOAD = Load(requests=8, prompt_tokens=40, new_tokens=64, layers=2, sites=2)


RAW, ENCODED = RowEncoding(), RowEncoding(capture_pb2.ENCODING_FULL8)


def filled(worker, positions, encoding=RAW, name="a"):
    """A block of up to 32 positions, in 2 layers."""
    block = worker.pool.take(Capture(name, 0, (0, 1), selection_pb2.PositionSelection(), encoding=encoding), 1)
    block.positions.extend(positions)
    return block


def send(worker, positions, *, may_gather=False, encoding=RAW):
    block = filled(worker, positions, encoding)
    block.may_gather = may_gather
    worker.sink.send([block])


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


@pytest.fixture
def encoder(monkeypatch):
    """Rows count as encoded at once: here only the sink's thread matters."""
    monkeypatch.setattr(GpuEncoder, "encode", lambda *_: None)


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize("blocks", [2, 3])
def test_blocks_that_leave_together_do_not_wait_for_each_others_room(tmp_path, monkeypatch, blocks):
    """A full ring gets room only from published extents, so the sink must publish before it waits for room."""
    monkeypatch.setattr(serving, "_RING_ROWS", blocks * 2 * 32)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker, monkeypatch.context() as patch:
        patch.setattr(serving.streamed_sink, "TOGETHER_BYTES", worker.producer.ring_bytes)
        patch.setattr(producer, "_ROUND_SECONDS", 0.0)  # otherwise the acknowledgements may come in time
        for step in range(100):
            worker.sink.send([filled(worker, range(32 * step, 32 * step + 32), ENCODED) for _ in range(8)])
        worker.drain()
        assert worker.producer.stats().waits > 0
        assert worker.producer.stats().freed == 800


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize("rows", [100, 300])
def test_a_full_ring_serves_rows_with_and_without_an_encoding(tmp_path, monkeypatch, rows):
    """Threads that wait for room leave each other some, and the rows of a capture leave in their order."""
    monkeypatch.setattr(serving, "_RING_ROWS", rows)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        sent, published = defaultdict(list), defaultdict(list)
        publish = worker.sink._writer.publish

        def note(*encoded):
            for one in encoded:
                published[one.capture.capture_id].extend(one.positions)
            publish(*encoded)

        monkeypatch.setattr(worker.sink._writer, "publish", note)
        rng = random.Random(0)
        for step in range(200):
            blocks = []
            for name, encoding in (("a", RAW), ("b", ENCODED), ("c", RAW), ("d", ENCODED)):
                positions = range(32 * step, 32 * step + rng.randint(1, 32))
                if rng.random() < 0.5:
                    blocks.append(filled(worker, positions, encoding, name))
                    sent[name].extend(positions)
            worker.sink.publish(may_be_last=rng.random() < 0.05)
            worker.sink.send(blocks)
        worker.drain()
        assert published == sent
        assert worker.producer.stats().waits > 0
        assert worker.pool.free_rows == len(worker.pool.memory)


@pytest.mark.parametrize("may_be_last", [True, False])
def test_rows_leave_even_if_no_step_follows(tmp_path, monkeypatch, may_be_last):
    if may_be_last:
        monkeypatch.setattr(serving.direct_copies, "LATE_SECONDS", 1000.0)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        for position in range(2):  # the thread sleeps, and again
            send(worker, [position])
            worker.sink.publish(may_be_last=may_be_last)
            wait_for(lambda: worker.pool.free_rows == len(worker.pool.memory), "the block, which came back")
            wait_for(lambda: not worker.producer.stats().bytes_used, "the rows, which were published")
            assert worker.producer.stats().freed == position + 1


def test_the_engines_thread_needs_no_other_while_steps_follow(tmp_path, monkeypatch):
    monkeypatch.setattr(serving.direct_copies, "LATE_SECONDS", 1000.0)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        run(worker, ships=True)
        worker.sink.publish(may_be_last=True)
        wait_for(lambda: not worker.sink._direct._has_blocks.is_set(), "the thread, which sleeps")
        calls = []
        with monkeypatch.context() as patch:
            patch.setattr(worker.sink, "_do", calls.append)
            patch.setattr(worker.sink._direct, "_look_after_blocks", lambda: calls.append("looked"))
            batch = Batch(worker, ships=True)
            for _ in range(150):
                batch.prepare()
                batch.finish()
            assert worker.producer.stats().published > 0
            assert not calls
        batch.end()
        worker.sink.publish(may_be_last=True)


@pytest.mark.usefixtures("encoder")
def test_a_pause_of_the_sink_ends_when_a_step_needs_blocks_or_all_are_to_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(serving.streamed_sink, "SHORT_PAUSE_SECONDS", 1000.0)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        for position in range(2 * len(worker.pool.memory) // 64):  # more blocks than the pool has room for
            send(worker, [position], encoding=ENCODED)
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


@pytest.mark.usefixtures("encoder")
def test_blocks_that_come_in_a_pause_leave_together(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(serving.streamed_sink, "SHORT_PAUSE_SECONDS", 1000.0)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        send(worker, [0], encoding=ENCODED)
        wait_for(lambda: groups == [1], "the first block, which finds the sink idle")
        for position in range(1, 5):
            send(worker, [position], encoding=ENCODED)
        worker.drain()
        assert groups == [1, 4]


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize(
    ("positions", "may_gather"),
    [(range(96, 97), True), (range(96, 128), False)],
    ids=["the end of a reply", "a prompt, or rows that are asked for at once"],
)
def test_blocks_of_a_reply_wait_until_something_urgent_comes(tmp_path, monkeypatch, groups, positions, may_gather):
    monkeypatch.setattr(serving.streamed_sink, "PAUSE_SECONDS", 1000.0)
    with Worker.running(LOAD, Device.HOST, tmp_path) as worker:
        send(worker, range(32), may_gather=True, encoding=ENCODED)
        wait_for(lambda: groups == [1], "the first block, which finds the sink idle")
        send(worker, range(32, 64), may_gather=True, encoding=ENCODED)
        send(worker, range(64, 96), may_gather=True, encoding=ENCODED)
        wait_for(lambda: worker.sink._gathers, "the pause for such blocks")
        assert groups == [1]
        send(worker, positions, may_gather=may_gather, encoding=ENCODED)
        wait_for(lambda: groups == [1, 3], "all of them")
        worker.drain()


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize("encoding", [RAW, ENCODED], ids=["raw", "encoded"])
def test_rows_that_cannot_be_sent_are_not_reported_as_sent(tmp_path, monkeypatch, encoding, capsys):
    def fail(*_):
        raise OSError("scripted")

    with suppress(TimeoutError), Worker.running(LOAD, Device.HOST, tmp_path) as worker:  # the context drains, too
        monkeypatch.setattr(worker.sink._writer, "publish", fail)
        send(worker, [0], encoding=encoding)
        wait_for(lambda: worker.pool.has_failed, "the failure")
        assert not worker.sink.flush(1000.0)
        with pytest.raises(PoolExhaustedError, match="the log above says why"):
            filled(worker, [1])
    assert "OSError: scripted" in "".join(capsys.readouterr())


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
