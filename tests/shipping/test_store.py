"""From a ring to a real store's pages and back: every row. tests/faults kills processes in between."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from residuum.rpc.channels import open_channel
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc, tensor_pb2
from tests.shipping.support import DEADLINE, ENVIRONMENT, Work
from tests.waiting import wait_for

LAYERS, WIDTH = 4, 64


class RealStore:
    """A store service in its own process."""

    def __init__(self, folder):
        self.folder = folder
        self.port = 0
        self.process = None
        self.start()
        self.channel = open_channel(self.endpoint)
        self.stub = store_pb2_grpc.StoreServiceStub(self.channel)

    @property
    def endpoint(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "store_svc", "--listen", self.endpoint, "--path", str(self.folder / "data")]
        self.process = subprocess.Popen([*command, "--port-file", str(port_file)], env=ENVIRONMENT)
        wait_for(lambda: port_file.exists() and port_file.read_text().strip(), "the store's port")
        self.port = int(port_file.read_text())

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.channel.close()
        self.kill()

    def open(self, capture_id, positions):
        description = capture_pb2.CaptureDescription(
            capture_id=capture_id,
            model="tiny",
            hidden_size=WIDTH,
            num_layers=LAYERS,
            dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            spec=capture_pb2.CaptureSpec(sites=[capture_pb2.SITE_RESID_POST], encoding=capture_pb2.ENCODING_RAW),
            prompt_token_ids=range(positions),
            num_sequences=1,
        )
        description.spec.layers.list.layers.extend(range(LAYERS))
        self.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description), wait_for_ready=True)

    def seal(self, capture_id):
        """Seal with one generated token, so that exactly the prompt's rows are expected; return the final manifest."""
        outcome = capture_pb2.SequenceOutcome(generated_token_ids=[1], finish_reason="length")
        request = store_pb2.SealCaptureRequest(
            capture_id=capture_id, sequences=[outcome], outcome=capture_pb2.CAPTURE_STATE_COMPLETE
        )
        self.stub.SealCapture(request, wait_for_ready=True)
        wait = store_pb2.GetCaptureRequest(capture_id=capture_id)
        wait.wait.FromSeconds(int(DEADLINE))
        return self.stub.GetCapture(wait).manifest

    def read(self, capture_id):
        rows = {}
        for response in self.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id=capture_id)):
            if response.HasField("chunk"):
                header = response.chunk.header
                shape = (len(header.layers), len(header.positions), WIDTH)
                values = np.frombuffer(response.chunk.payload, "<f4").reshape(shape)
                for number, layer in enumerate(header.layers):
                    for at, position in enumerate(header.positions):
                        assert (capture_id, layer, position) not in rows
                        rows[capture_id, layer, position] = values[number, at].tobytes()
        return rows


@pytest.fixture
def store(tmp_path):
    store = RealStore(tmp_path)
    yield store
    store.close()


def test_rows_come_back_unchanged(store, start_producer, start_shipper):
    work = Work(start_producer())
    start_shipper(store.endpoint)
    for name in ("a", "b"):
        store.open(name, 40)
        work.publish(name, range(32))
        work.publish(name, range(32, 40))
    assert work.producer.drain(DEADLINE)
    for name in ("a", "b"):
        assert store.seal(name).state == capture_pb2.CAPTURE_STATE_COMPLETE
    assert store.read("a") | store.read("b") == work.expected


def test_several_headers_in_one_extent_and_a_large_extent_come_back_unchanged(store, start_producer, start_shipper):
    work = Work(start_producer(ring_bytes=48 << 20))
    start_shipper(store.endpoint)
    store.open("parts", 100)
    work.publish("parts", range(1), range(1, 32), range(40, 100), [32, 34, 36, 38], [33, 35, 37, 39])
    store.open("large", 40_960)
    work.publish("large", range(30_000), range(30_000, 40_960))  # 40 MiB, each layer more than a chunk holds
    assert work.producer.drain(DEADLINE)
    assert (work.producer.stats().freed, work.producer.stats().bytes_used) == (2, 0)
    for name in ("parts", "large"):
        assert store.seal(name).state == capture_pb2.CAPTURE_STATE_COMPLETE
    assert store.read("parts") | store.read("large") == work.expected


def test_a_reported_loss_ends_only_its_capture_incomplete(store, start_producer, start_shipper):
    work = Work(start_producer())
    start_shipper(store.endpoint)
    for name in ("lost", "whole"):
        store.open(name, 8)
        work.publish(name, range(4))
    work.publish("whole", range(4, 8))
    loss = store_pb2.RowLoss(
        sites=[capture_pb2.SITE_RESID_POST],
        layers=range(LAYERS),
        positions=range(4, 8),
        reason=capture_pb2.INCOMPLETE_REASON_OVERFLOW,
        detail="the ring was full",
    )
    work.producer.report_loss("lost", loss)
    assert work.producer.drain(DEADLINE)
    manifest = store.seal("lost")
    assert manifest.state == capture_pb2.CAPTURE_STATE_INCOMPLETE
    assert manifest.incomplete_reason == capture_pb2.INCOMPLETE_REASON_OVERFLOW
    assert store.seal("whole").state == capture_pb2.CAPTURE_STATE_COMPLETE


def test_rows_of_deleted_captures_do_not_delay_others(store, start_producer, start_shipper):
    work = Work(start_producer())
    start_shipper(store.endpoint)
    store.open("kept", 4)
    work.publish("never-opened", range(4))
    work.publish("kept", range(4))
    assert work.producer.drain(DEADLINE)
    assert store.seal("kept").state == capture_pb2.CAPTURE_STATE_COMPLETE
