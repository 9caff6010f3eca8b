"""The sink: blocks go to the ring, or to the self-test, and losses are reported."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from inference_svc.shipping.framing import cut
from inference_svc.shipping.protocol import Done, ExtentReady, MessageReader
from inference_svc.shipping.worker.producer import RingProducer
from inference_svc.taps.blocks import BlockPool, PoolExhaustedError
from inference_svc.taps.plan import RequestPlan, RowEncoding
from inference_svc.taps.ring_writer import Encoded, _headers
from inference_svc.taps.sink import BlockSink, ModelRows
from inference_svc.taps.vllm.worker import TappedWorker
from residuum.v1 import capture_pb2, tensor_pb2
from residuum.wire.limits import TARGET_PLACED_CHUNK_BYTES
from residuum.wire.rows.encodings import RowFormat
from tests.inference.taps_support import CPU, Worker, capture, select


def run_request(worker, plan, tokens):
    """Compute a prompt in one step, then end the request."""
    rows = torch.arange(tokens * worker.hidden, dtype=worker.dtype).view(tokens, worker.hidden)
    tensors = {layer: (rows + 1000 * layer, None) for layer in worker.layers}
    worker.step([("a", 0, tokens)], admitted=[("a", plan)], tensors=tensors)
    worker.step([], finished=["a"])
    return tensors


def test_a_full_ring_sheds_rows_and_reports_the_loss():
    worker = Worker(ring_bytes=40 * 2 * 8 * 4)
    run_request(worker, RequestPlan(70, capture("c", layers=(0, 1), sheds=True)), 70)
    assert [chunk.positions for chunk in worker.ring.take()] == [[*range(32)], [*range(64, 70)]]
    ((name, loss),) = worker.ring.losses
    assert (name, loss.reason) == ("c", capture_pb2.INCOMPLETE_REASON_OVERFLOW)
    assert (list(loss.layers), list(loss.positions)) == ([0, 1], list(range(32, 64)))
    assert (loss.sequence, list(loss.sites)) == (0, [capture_pb2.SITE_RESID_POST])
    assert worker.pool.free_rows == 16 * 2 * 32


MIXED = {
    "layers": (0, 1, 2),
    "sites": (capture_pb2.SITE_RESID_POST, capture_pb2.SITE_RESID_PRE),
    "site_layers": ((0, 2), (1,)),
}
"""Different layers at each site. The stream before layer 1 is the stream after layer 0."""


@pytest.mark.parametrize("before", [False, True])
def test_each_site_leaves_with_its_layers(before):
    worker = Worker(layers=range(3))
    plan = RequestPlan(40, capture("c", **MIXED, before_steering=before))
    tensors = run_request(worker, plan, 40)
    found = {}
    for chunk in worker.ring.take():
        for layer, rows in zip(chunk.header.layers, chunk.rows, strict=True):
            found.setdefault((chunk.header.site, layer), []).append(rows)
    rows = {place: np.concatenate(parts) for place, parts in found.items()}
    post, pre = MIXED["sites"]
    expected = {(post, 0): 0, (post, 2): 2, (pre, 1): 0}
    assert rows.keys() == expected.keys()
    for place, layer in expected.items():
        np.testing.assert_array_equal(rows[place], tensors[layer][0].numpy())


def test_lost_rows_are_those_of_each_site():
    worker = Worker(layers=range(3), ring_bytes=40 * 3 * 8 * 4)
    run_request(worker, RequestPlan(70, capture("c", **MIXED, sheds=True)), 70)
    lost = [(list(loss.sites), list(loss.layers), len(loss.positions)) for _, loss in worker.ring.losses]
    assert lost == [([MIXED["sites"][0]], [0, 2], 32), ([MIXED["sites"][1]], [1], 32)]


def test_a_full_ring_blocks_the_step_of_a_capture_that_must_not_be_shed():
    worker = Worker(ring_bytes=40 * 2 * 8 * 4)
    with pytest.raises(AssertionError, match="would wait"):
        run_request(worker, RequestPlan(70, capture("c", layers=(0, 1))), 70)


def test_a_probe_stays_in_the_worker():
    worker = Worker(layers=range(3), dtype=torch.bfloat16)
    plan = RequestPlan(40, capture("probe", layers=(0, 2), is_probe=True))
    tensors = run_request(worker, plan, 40)
    assert not worker.ring.chunks
    blocks = worker.sink.take_probe("probe")
    assert [block.positions for block in blocks] == [[*range(32)], [*range(32, 40)]]
    rows = torch.cat([block.rows for block in blocks], dim=1)
    assert torch.equal(rows, torch.stack([tensors[0][0], tensors[2][0]]))
    assert worker.sink.take_probe("probe") == []
    assert worker.pool.free_rows == 16 * 2 * 32


def test_a_probe_outlives_its_block():
    worker = Worker(rows=2 * 2 * 32)
    run_request(worker, RequestPlan(4, capture("probe", layers=(0, 1), is_probe=True)), 4)
    (probe,) = worker.sink.take_probe("probe")
    kept = probe.rows.clone()
    worker.pool.memory.fill_(7)
    assert torch.equal(probe.rows, kept)


class _DummyBatches:
    """The part of vLLM's worker that runs the model without requests."""

    def execute_dummy_batch(self):
        for layer in self.worker.layers:
            self.worker.tap.tap(torch.full((1, self.worker.hidden), 9.0), None, self.worker.points.after(layer))


class _IdleWorker(TappedWorker, _DummyBatches):
    def __init__(self, worker):
        self.worker = self._residuum = worker


def test_a_dummy_batch_leaves_captured_rows_alone():
    """With data parallelism, a mixture of experts also runs between the steps of its requests."""
    worker = Worker()
    plan = RequestPlan(1, capture("c", layers=(0, 1)))
    ones = {layer: (torch.ones(1, worker.hidden), None) for layer in worker.layers}
    worker.step([("r", 0, 1)], admitted=[("r", plan)], tensors=ones)
    for position in (1, 2):
        worker.step([("r", position, 1)], tensors=ones)
        _IdleWorker(worker).execute_dummy_batch()
    worker.step([], finished=["r"])
    chunks = worker.ring.take()
    assert [chunk.positions for chunk in chunks] == [[0], [1, 2]]
    for chunk in chunks:
        assert (chunk.rows == 1).all()


def test_a_stage_ships_nothing_of_layers_of_other_stages():
    worker = Worker(layers=range(4, 6))
    run_request(worker, RequestPlan(40, capture("c", layers=(0, 1))), 40)
    assert worker.ring.chunks == worker.ring.losses == []
    assert worker.pool.free_rows == 16 * 2 * 32


def test_a_chunk_header_describes_its_rows():
    worker = Worker(dtype=torch.bfloat16, hidden=4)
    run_request(worker, RequestPlan(3, capture("c", layers=(1,), positions=select((1, None)))), 3)
    (chunk,) = worker.ring.take()
    assert chunk.header == capture_pb2.ChunkHeader(
        site=capture_pb2.SITE_RESID_POST,
        layers=[1],
        positions=[1, 2],
        dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
        width=4,
        encoding=capture_pb2.ENCODING_RAW,
    )


@pytest.mark.parametrize("count", [1, 1024, 1025, 4000])
def test_the_headers_of_all_sites_have_all_positions(count):
    sites = (capture_pb2.SITE_RESID_PRE, capture_pb2.SITE_RESID_POST, capture_pb2.SITE_MLP_OUT)
    worker = Worker(rows=3 * 2 * 4096, ring_bytes=1 << 22)
    writer, plan = worker.sink._writer, capture("c", layers=(0, 1), sites=tuple(sorted(sites)))
    positions = list(range(7, 7 + count))
    form = writer.format_of(plan)
    writer.publish(Encoded(plan, positions, form, writer.acquire(plan, positions, form, block=False)))
    headers = [chunk.header for chunk in worker.ring.take()]
    assert [header.site for header in headers] == sorted(sites)
    assert all(list(header.positions) == positions for header in headers)
    assert all(list(header.layers) == [0, 1] for header in headers)


def test_headers_are_those_of_their_capture_and_format_whatever_came_before():
    """The parts of a header that do not change are kept serialised."""
    writer = Worker().sink._writer
    encoding = RowEncoding(capture_pb2.ENCODING_FULL8, axis=capture_pb2.QUANTIZATION_AXIS_DIMENSION)
    sites = (capture_pb2.SITE_RESID_PRE, capture_pb2.SITE_RESID_POST, capture_pb2.SITE_MLP_OUT)
    plans = [
        capture("a", layers=(0, 1)),
        capture("a", layers=(1,)),  # another request with the ID of an earlier one
        replace(capture("a", layers=(1,)), sequence=3),
        capture("a", layers=(0, 1), sites=sites, site_layers=((0,), (0, 1), (1,)), encoding=encoding),
    ]
    for plan, positions in product([*plans, *reversed(plans)], ([5, 9], list(range(3000)))):
        form = writer.format_of(plan)
        headers = [capture_pb2.ChunkHeader.FromString(header) for header in _headers(plan, positions, form)]
        assert [(header.site, tuple(header.layers)) for header in headers] == list(plan.places)
        for header in headers:
            assert (header.sequence, list(header.positions)) == (plan.sequence, positions)
            assert RowFormat.of(header) == form


def test_a_pool_that_is_too_small_fails_loudly():
    pool = BlockPool(32, 4, torch.float32, CPU, largest_block=0)
    pool.take(capture(), 1)
    with pytest.raises(PoolExhaustedError, match="too small"):
        pool.take(capture(), 1)


def test_a_block_has_the_requested_capacity():
    pool = BlockPool(4000, 4, torch.float32, CPU, largest_block=600)
    blocks = [pool.take(capture(layers=layers), positions) for layers, positions in (((3,), 1), ((0, 5, 9), 500))]
    assert [block.num_rows for block in blocks] == [32, 3 * 200], (
        "at least 32 positions, at most as many as fit the ring"
    )
    assert pool.free_rows == 4000 - 632
    for block in blocks:
        pool.give_back(block)
    assert pool.free_rows == 4000


@pytest.mark.parametrize("width", [64, 1024, 100_000])
def test_a_layer_of_a_block_fits_one_chunk(width):
    """Otherwise the rows of a prompt travel in several times as many chunks, each with one layer alone."""
    pool = BlockPool(3 * 4096, width, torch.bfloat16, torch.device("meta"), largest_block=3 * 4096)
    block = pool.take(capture(layers=(0, 5, 9)), 4096)
    header = capture_pb2.ChunkHeader(
        site=capture_pb2.SITE_RESID_POST,
        layers=(0, 5, 9),
        positions=range(block.capacity),
        dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
        width=width,
        encoding=capture_pb2.ENCODING_RAW,
    )
    payload = np.broadcast_to(np.uint8(0), block.num_rows * width * 2).data
    layers = [len(piece.header.layers) for piece in cut(header, payload, TARGET_PLACED_CHUNK_BYTES)]
    assert layers == {64: [3], 1024: [3], 100_000: [1] * 12}[width], "a block has at least 32 positions"


def test_a_pool_without_a_long_run_gives_a_short_one():
    pool = BlockPool(100, 4, torch.float32, CPU, largest_block=100)
    pool.take(capture(), 60)
    assert pool.take(capture(), 60).capacity == 32


def test_a_block_travels_through_the_real_ring(tmp_path):
    """When a shipper is told of an extent, the rows are in shared memory as the header describes."""
    pool = BlockPool(128, 4, torch.bfloat16, CPU, largest_block=0)
    producer = RingProducer(tmp_path / "ring", ring_bytes=1 << 16)
    producer.start()
    try:
        sink = BlockSink(pool, ModelRows(4, tensor_pb2.DATA_TYPE_BFLOAT16), producer)
        block = pool.take(capture("c", layers=(0, 1)), 1)
        block.positions.extend([5, 6, 7])
        pool.memory[block.first_row :][:64] = torch.arange(2 * 32 * 4).view(64, 4)
        sink.send([block])
        with socket.socket(socket.AF_UNIX) as shipper:
            shipper.settimeout(20)
            shipper.connect(str(tmp_path / "ring"))
            ready = receive_extent(shipper)
            (header,) = ready.headers
            assert (ready.capture_id, list(header.positions)) == ("c", [5, 6, 7])
            expected = torch.arange(2 * 32 * 4).to(torch.bfloat16).view(2, 32, 4)[:, :3].contiguous()
            expected_bytes = expected.view(torch.uint8).numpy().ravel()
            np.testing.assert_array_equal(producer.memory[ready.offset :][: len(expected_bytes)], expected_bytes)
            shipper.sendall(Done(ready.ticket).encode())
            assert producer.drain(20)
    finally:
        producer.close()


def receive_extent(shipper):
    reader = MessageReader()
    while True:
        for message in reader.feed(shipper.recv(1 << 16)):
            if isinstance(message, ExtentReady):
                return message


def test_the_real_ring_blocks_a_step_until_there_is_room(tmp_path):
    pool = BlockPool(96, 4, torch.float32, CPU, largest_block=0)
    producer = RingProducer(tmp_path / "ring", ring_bytes=1 << 16)
    producer.start()
    sink = BlockSink(pool, ModelRows(4, tensor_pb2.DATA_TYPE_FLOAT32), producer)
    try:
        held = producer.acquire(producer.ring_bytes, block=True)
        step = threading.Thread(target=send_one, args=(pool, sink))
        step.start()
        while not producer.stats().waits:  # the step cannot end before it has waited
            assert step.is_alive()
        producer.release(held)
        step.join(20)
        assert not step.is_alive()
        assert producer.stats().published == 1
    finally:
        producer.close()


def send_one(pool, sink):
    block = pool.take(capture("c"), 1)
    block.positions.append(0)
    sink.send([block])
