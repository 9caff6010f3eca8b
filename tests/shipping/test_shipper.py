"""Shipper processes, started as in the service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inference_svc.shipping.shipper.program import main
from tests import ports
from tests.shipping.support import DEADLINE, ENVIRONMENT, Work
from tests.waiting import wait_for

WORKER = """
import sys
from inference_svc.shipping.worker.producer import RingProducer
from tests.shipping.support import Work

producer = RingProducer(sys.argv[1], ring_bytes=8 << 20)
work = Work(producer)
producer.start()
for number in range(8):
    work.publish("capture", range(number * 32, number * 32 + 32))
print("published", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def work(start_producer):
    return Work(start_producer())


def publish_some(work, count=16):
    for number in range(count):
        work.publish(f"capture-{number}", range(number * 32, number * 32 + 32))


def test_a_killed_shippers_rows_are_delivered_by_the_next(work, start_store, start_shipper):
    gate = threading.Event()
    store = start_store(lambda store, request, context: request.number > 4 and gate.wait(DEADLINE) and None)
    first = start_shipper(store.endpoint)
    publish_some(work)
    wait_for(lambda: work.producer.stats().freed == 4)
    first.kill()
    first.wait()
    gate.set()
    start_shipper(store.endpoint)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert work.producer.stats().freed == 16


def test_a_shipper_killed_in_mid_extent_loses_nothing(start_producer, start_store, start_shipper):
    gate = threading.Event()
    store = start_store(lambda store, request, context: request.number > 3 and gate.wait(DEADLINE) and None)
    work = Work(start_producer(ring_bytes=16 << 20))
    first = start_shipper(store.endpoint)
    work.publish("capture", range(32), range(32, 64), layers=32, width=1024)
    store.wait_for(lambda: store.messages == 4)
    assert 0 < len(store.rows) < len(work.expected)
    first.kill()
    first.wait()
    assert work.producer.stats().freed == 0
    gate.set()
    start_shipper(store.endpoint)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert (work.producer.stats().freed, work.producer.stats().bytes_used) == (1, 0)


def test_a_large_extent_goes_through_with_little_memory(start_producer, start_store, start_shipper):
    gate = threading.Event()
    store = start_store(lambda *_: gate.wait(DEADLINE) and None)
    work = Work(start_producer(ring_bytes=48 << 20))
    shipper = start_shipper(store.endpoint, "--max-unacked-bytes", str(4 << 20))
    work.publish("warm-up", range(4))
    gate.set()
    assert work.producer.drain(DEADLINE)
    before, most = own_bytes(shipper), 0
    gate.clear()
    work.publish("capture", range(40), range(40, 80), layers=128, width=1024)  # 40 MiB
    store.wait_for(lambda: store.messages == 2)
    gate.set()
    while not work.producer.drain(0.005):
        most = max(most, own_bytes(shipper))
    assert store.rows == work.expected
    assert store.messages == 1 + 2 * 11  # up to twelve layers of 160 KiB in each
    assert most
    assert most - before < 16 << 20


def own_bytes(process):
    """A process's private memory, without the ring that it shares."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_two_shippers_share_captures_and_one_takes_over_from_the_other(work, start_store, start_shipper):
    store = start_store()
    shippers = [start_shipper(store.endpoint) for _ in range(2)]
    wait_for(lambda: work.producer.stats().connected_shippers == 2)
    for _ in range(3):
        publish_some(work)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected
    assert all(len(set(peers)) == 1 for peers in store.peers.values())
    assert len({peer for peers in store.peers.values() for peer in peers}) == 2
    shippers[0].kill()
    work.publish("after", range(4))
    for number in range(16):
        work.publish(f"later-{number}", range(4))
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected


def test_one_shipper_serves_several_workers(start_producer, start_store, start_shipper, tmp_path):
    paths = [tmp_path / "stage-0", tmp_path / "stage-1"]
    store = start_store()
    start_shipper(store.endpoint, paths=paths)
    works = [Work(start_producer(path=path)) for path in paths]
    for number, work in enumerate(works):
        work.publish("capture", range(number * 32, number * 32 + 32))
    assert all(work.producer.drain(DEADLINE) for work in works)
    assert store.rows == works[0].expected | works[1].expected


def test_items_of_a_dead_worker_are_delivered_and_its_successor_is_served(
    control_path, start_producer, start_store, start_shipper
):
    gate = threading.Event()
    store = start_store(lambda *_: gate.wait(DEADLINE) and None)
    command = [sys.executable, "-c", WORKER, str(control_path)]
    worker = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert worker.stdout.readline() == b"published\n"
        start_shipper(store.endpoint)  # now, so that it gets everything at once
        store.wait_for(lambda: store.messages)
    finally:
        worker.kill()
        worker.communicate()
    successor = Work(start_producer())
    successor.publish("next", range(4))
    gate.set()
    assert successor.producer.drain(DEADLINE)
    store.wait_for(lambda: len(store.rows) == 4 * (8 * 32 + 4))
    assert store.rows.items() >= successor.expected.items()


def test_sigterm_delivers_items_and_accepts_no_more(work, start_store, start_shipper):
    gate = threading.Event()
    store = start_store(lambda *_: gate.wait(DEADLINE) and None)
    shipper = start_shipper(store.endpoint)
    publish_some(work, count=8)
    store.wait_for(lambda: store.messages)
    handed_over = dict(work.expected)
    shipper.terminate()
    wait_for(lambda: work.producer.stats().connected_shippers == 0)
    work.publish("later", range(4))
    gate.set()
    assert shipper.wait(DEADLINE) == 0
    assert store.rows == handed_over
    start_shipper(store.endpoint)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected


def test_sigterm_without_a_store_ends_at_the_grace_and_loses_nothing(work, start_store, start_shipper):
    shipper = start_shipper(f"127.0.0.1:{ports.reserve()}", "--grace", "0.3")
    publish_some(work, count=4)
    wait_for(lambda: work.producer.stats().connected_shippers)
    shipper.send_signal(signal.SIGINT)
    assert shipper.wait(DEADLINE) in (0, 1)  # 0 if it had not read the socket yet
    store = start_store()
    start_shipper(store.endpoint)
    assert work.producer.drain(DEADLINE)
    assert store.rows == work.expected


def test_a_silent_store_is_tried_again_after_the_ack_timeout(work, start_store, start_shipper):
    released = threading.Event()
    store = start_store(lambda store, *_: store.streams == 1 and released.wait(DEADLINE) and None)
    start_shipper(store.endpoint, "--ack-timeout", "0.1")
    publish_some(work, count=4)
    assert work.producer.drain(DEADLINE)
    released.set()
    assert store.rows == work.expected


def test_a_shipper_whose_parent_is_another_ends_at_once(start_shipper, start_store):
    shipper = start_shipper(start_store().endpoint, "--parent-pid", str(os.getppid()))
    assert shipper.wait(DEADLINE) == 0


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for option in ("--control", "--store", "--max-unacked-bytes", "--ack-timeout", "--grace", "--parent-pid"):
        assert option in text
