"""A shipper's end of the control socket, against a worker that is played by hand."""

from __future__ import annotations

import os
import socket

import pytest

from inference_svc.shipping import control
from inference_svc.shipping.control import ControlClient
from inference_svc.shipping.outbox import Outbox
from inference_svc.shipping.protocol import Done, Hello, SlotReady
from inference_svc.shipping.ring import SharedRing
from tests.shipping.support import DEADLINE, make_header

GOOD = SlotReady(1, 0, "a", make_header([0], layers=1))
HELLO = Hello(num_slots=2, slot_bytes=4096, stride=4096)


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
    _, descriptor = SharedRing.create(2, 4096)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def outbox(worker, control_path, monkeypatch):
    monkeypatch.setattr(control, "_LONGEST_DELAY_SECONDS", 0.05)
    outbox = Outbox(1 << 20)
    client = ControlClient(control_path, outbox)
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
        (Hello(2, 4096, 4096, version=2), GOOD),
        (Hello(2000, 4096, 4096), GOOD),
        (GOOD,),
        (HELLO, HELLO),
        (HELLO, SlotReady(1, 2, "a", make_header([0]))),
        (HELLO, SlotReady(1, 0, "a", make_header([0], dtype=0))),
        (HELLO, Done(1)),
    ],
    ids=["version", "size", "no-hello", "two-hellos", "no-such-slot", "no-dtype", "done"],
)
def test_a_worker_that_talks_nonsense_is_left_and_tried_again(worker, descriptor, outbox, messages):
    connection = greet(worker, [descriptor], *messages)
    assert connection.recv(1) == b""
    connection.close()
    assert not outbox._waiting
    with greet(worker, [descriptor], HELLO, GOOD):
        assert outbox.take(outbox.start_stream())[1].capture_id == "a"


def test_rows_that_no_chunk_can_hold_become_a_loss(worker, descriptor, outbox):
    header = make_header([7], layers=1, width=1 << 20)
    with greet(worker, [descriptor], HELLO, SlotReady(1, 0, "a", header)) as connection:
        _, parcel = outbox.take(outbox.start_stream())
        assert list(parcel.content.positions) == [7]
        parcel.delivery.finish_one()
        assert connection.recv(64) == Done(1).encode()
