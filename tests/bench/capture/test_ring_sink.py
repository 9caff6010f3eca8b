from types import SimpleNamespace

import pytest

from bench.capture.sinks.ring_consumer import Tally
from bench.capture.sinks.ring_sink import RingSink
from bench.capture.sinks.sink import Arrived, RowsMissingError
from bench.processes import RunFailedError
from inference_svc.shipping.worker.producer import RingProducer
from residuum.v1 import capture_pb2, store_pb2, tensor_pb2

POST, PRE = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE


def header(layers, positions, site=POST):
    return capture_pb2.ChunkHeader(
        site=site,
        layers=layers,
        positions=positions,
        dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
        width=4,
        encoding=capture_pb2.ENCODING_RAW,
    )


def test_a_tally_is_complete_when_every_row_has_arrived():
    tally = Tally([POST], layers=[0, 1], num_positions=3)
    tally.add(header([0, 1], [0, 1]))
    assert not tally.is_complete
    tally.add(header([1], [2]))
    assert not tally.is_complete
    tally.add(header([0], [2]))
    assert tally.is_complete
    assert (tally.rows, tally.num_bytes) == (6, 6 * 4 * 2)


def test_duplicate_and_unrequested_rows_do_not_count():
    tally = Tally([POST], layers=[0, 1], num_positions=3)
    tally.add(header([0, 1], [0, 1, 2]))
    tally.add(header([0, 1], [2, 3]))
    assert tally.rows == 6


def test_rows_are_counted_for_each_site():
    tally = Tally([POST, PRE], layers=[0, 1], num_positions=3)
    tally.add(header([0, 1], [0, 1, 2], PRE))
    assert not tally.is_complete
    tally.add(header([0, 1], [0, 1, 2], POST))
    assert tally.is_complete
    assert (tally.rows, tally.num_bytes) == (12, 12 * 4 * 2)


@pytest.fixture
def producer(tmp_path):
    made = RingProducer(tmp_path / "ring.sock", ring_bytes=4096)
    made.start()
    yield made
    made.close()


def publish(producer, capture_id, *headers):
    producer.publish(producer.acquire(2048, block=True), capture_id, headers)


@pytest.fixture
async def sink(producer, tmp_path):
    facts = SimpleNamespace(sites=(POST,), num_layers=2, control_paths=(str(tmp_path / "ring.sock"),))
    made = RingSink(facts, rows_per_request=3, layers=[0, 1])
    await made.start()
    yield made
    await made.stop()


async def test_extents_are_counted_and_freed(producer, sink):
    for number in range(3):  # more extents than the ring has room for
        await sink.begin({f"{number}": [1, 2]})
        publish(producer, f"{number}", header([0, 1], [0, 1]))
        publish(producer, f"{number}", header([0], [2]), header([1], [2]))
        assert producer.drain(10)
        assert await sink.finish({f"{number}": [3, 4]}) == Arrived(rows=6, num_bytes=48)


async def test_every_site_is_waited_for(producer, tmp_path):
    facts = SimpleNamespace(sites=(POST, PRE), num_layers=1, control_paths=(str(tmp_path / "ring.sock"),))
    sink = RingSink(facts, rows_per_request=2, layers=[0])
    await sink.start()
    try:
        await sink.begin({"a": [1]})
        publish(producer, "a", header([0], [0, 1], POST), header([0], [0, 1], PRE))
        assert producer.drain(10)
        assert await sink.finish({"a": [2, 3]}) == Arrived(rows=4, num_bytes=32)
        await sink.begin({"b": [1]})
        publish(producer, "b", header([0], [0, 1], POST))
        assert producer.drain(10)
        with pytest.raises(RowsMissingError, match="'b'"):
            await sink.finish({"b": [2, 3]})
    finally:
        await sink.stop()


async def test_a_missing_row_is_an_error(producer, sink):
    await sink.begin({"a": [1, 2]})
    publish(producer, "a", header([0, 1], [0, 1]))
    assert producer.drain(10)
    with pytest.raises(RowsMissingError, match="'a'"):
        await sink.finish({"a": [3, 4]})


async def test_rows_of_an_unknown_capture_are_an_error(producer, sink):
    await sink.begin({"a": [1, 2]})
    publish(producer, "a", header([0, 1], [0, 1, 2]))
    publish(producer, "b", header([0, 1], [0]))
    assert producer.drain(10)
    with pytest.raises(RowsMissingError, match="b: rows arrived that were not requested"):
        await sink.finish({"a": [3, 4]})


async def test_rows_at_another_site_are_an_error(producer, sink):
    await sink.begin({"a": [1, 2]})
    publish(producer, "a", header([0, 1], [0, 1, 2]))
    publish(producer, "a", header([0], [0], PRE))
    assert producer.drain(10)
    with pytest.raises(RowsMissingError, match="a: rows arrived that were not requested"):
        await sink.finish({"a": [3, 4]})


async def test_a_dead_consumer_is_an_error(sink):
    sink._consumer.process.kill()
    sink._consumer.process.wait()
    with pytest.raises(RunFailedError, match="ring_consumer has ended"):
        await sink.begin({"a": [1, 2]})


async def test_a_loss_is_an_error(producer, sink):
    await sink.begin({"a": [1, 2]})
    publish(producer, "a", header([0, 1], [0, 1, 2]))
    producer.report_loss("a", store_pb2.RowLoss(detail="the ring was full"))
    assert producer.drain(10)
    with pytest.raises(RowsMissingError, match="the ring was full"):
        await sink.finish({"a": [3, 4]})


async def test_only_the_requested_layers_are_expected(producer, tmp_path):
    facts = SimpleNamespace(sites=(POST,), num_layers=9, control_paths=(str(tmp_path / "ring.sock"),))
    sink = RingSink(facts, rows_per_request=2, layers=[1, 7])
    await sink.start()
    try:
        await sink.begin({"a": [1]})
        publish(producer, "a", header([1, 7], [0, 1]))
        assert producer.drain(10)
        assert await sink.finish({"a": [2, 3]}) == Arrived(rows=4, num_bytes=32)
        await sink.begin({"b": [1]})
        publish(producer, "b", header([1, 2], [0, 1]))
        assert producer.drain(10)
        with pytest.raises(RowsMissingError, match="b: rows arrived that were not requested"):
            await sink.finish({"b": [2, 3]})
    finally:
        await sink.stop()
