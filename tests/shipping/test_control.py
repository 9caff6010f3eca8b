"""The shipper's side of the control socket. The test plays the worker."""

from __future__ import annotations

import os
import socket

import pytest

from inference_svc.shipping.protocol import Done, ExtentReady, Hello
from inference_svc.shipping.ring import SharedRing
from inference_svc.shipping.shipper import control
from inference_svc.shipping.shipper.control import ControlClient
from inference_svc.shipping.shipper.outbox import Outbox
from tests.shipping.support import DEADLINE, make_header

GOOD = ExtentReady(1, 0, "a", (make_header([0], layers=1),))
RING_BYTES = 7 << 20
HELLO = Hello(RING_BYTES)


@pytest.fixture
def worker(control_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(control_path))
    listener.listen()
    listener.settimeout(DEADLINE)
    yield listener
    listener.close()


@pytest.fixture
def descriptor():
    _, descriptor = SharedRing.create(RING_BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def outbox(worker, control_path, monkeypatch):
    monkeypatch.setattr(control, "_LONGEST_DELAY_SECONDS", 0.05)
    outbox = Outbox(1 << 20)
    client = ControlClient(control_path, lambda _, parcels: outbox.put(parcels))
    client.start()
    yield outbox
    client.close()


def greet(worker, descriptors, *messages):
    connection, _ = worker.accept()
    connection.settimeout(DEADLINE)
    socket.send_fds(connection, [b"".join(message.encode() for message in messages)], descriptors)
    return connection


@pytest.mark.parametrize(
    "messages",
    [
        (Hello(RING_BYTES, version=1), GOOD),
        (Hello(1 << 30), GOOD),
        (GOOD,),
        (HELLO, HELLO),
        (HELLO, ExtentReady(1, RING_BYTES, "a", (make_header([0]),))),
        (HELLO, ExtentReady(1, RING_BYTES - 256, "a", (make_header([0]),))),
        (HELLO, ExtentReady(1, 0, "a", (make_header([]),))),
        (HELLO, ExtentReady(1, 0, "a", (make_header([1]), make_header([0], dtype=0)))),
        (HELLO, Done(1)),
    ],
    ids=["version", "size", "no-hello", "two-hellos", "beyond", "across-the-end", "empty", "no-dtype", "done"],
)
def test_a_worker_with_invalid_messages_is_disconnected_and_retried(worker, descriptor, outbox, messages):
    connection = greet(worker, [descriptor], *messages)
    assert connection.recv(1) == b""
    connection.close()
    assert not outbox._sources
    with greet(worker, [descriptor], HELLO, GOOD):
        assert outbox.take(outbox.start_stream())[1].capture_id == "a"


def test_rows_that_no_chunk_can_hold_become_a_loss(worker, descriptor, outbox):
    headers = (make_header([6], layers=1), make_header([7], layers=1, width=3 << 19), make_header([8], layers=1))
    with greet(worker, [descriptor], HELLO, ExtentReady(1, 0, "a", headers)) as connection:
        stream = outbox.start_stream()
        first, loss, last = (outbox.take(stream)[1] for _ in headers)
        assert [list(piece.content.header.positions) for piece in (first, last)] == [[6], [8]]
        assert list(loss.content.positions) == [7]
        for parcel in (first, loss, last):
            connection.settimeout(0.05)
            with pytest.raises(TimeoutError):
                connection.recv(64)
            parcel.settle()
        connection.settimeout(DEADLINE)
        assert connection.recv(64) == Done(1).encode()
