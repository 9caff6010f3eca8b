"""The figures of workers and shippers, read by another process."""

from __future__ import annotations

import asyncio
import threading

from inference_svc.shipping import figures
from inference_svc.shipping.figures import FigureFile, figures_by_store, figures_path, read_figures
from inference_svc.shipping.supervisor import ShipperSupervisor
from tests.shipping.support import DEADLINE, ENVIRONMENT, Work
from tests.waiting import wait_for


def test_a_file_is_written_when_something_changed_and_not_too_often(tmp_path, monkeypatch):
    now, seen = [100.0], {"a": 1.0}
    looks = []

    def look():
        looks.append(now[0])
        return dict(seen)

    monkeypatch.setattr(figures.time, "monotonic", lambda: now[0])
    path = tmp_path / "x.figures"
    assert read_figures(path) == {}
    file = FigureFile(path, look)
    file.refresh()
    assert read_figures(path) == {"a": 1.0}
    written = path.stat().st_ino
    seen["a"] = 2.0
    now[0] += 0.9
    file.refresh()
    assert looks == [100.0]
    now[0] += 0.2
    file.refresh()
    assert read_figures(path) == {"a": 2.0}
    written = path.stat().st_ino
    now[0] += 5
    file.refresh()
    assert path.stat().st_ino == written, "without a change, nothing is written"
    file.remove()
    assert read_figures(path) == {}
    file.remove()
    seen["a"] = 3.0
    now[0] += 5
    tmp_path.rmdir()
    file.refresh()  # as on a full disk: no reason to fail


def test_a_truncated_figures_file_counts_as_empty(tmp_path):
    path = tmp_path / "x"
    path.write_text('{"a": ')
    assert read_figures(path) == {}


async def test_a_worker_and_a_shipper_report_their_figures(
    start_producer, start_store, control_path, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    work, store = Work(start_producer()), start_store()
    supervisor = ShipperSupervisor([control_path], store.endpoint, 1, folder=tmp_path)
    await supervisor.start()
    try:
        for number in range(4):
            work.publish(f"capture-{number}", range(32))
        assert await asyncio.to_thread(work.producer.drain, DEADLINE)
        ring = await asyncio.to_thread(wait_for, lambda: _settled(figures_path(control_path)))
        assert (ring["published"], ring["freed"], ring["under_way"], ring["bytes_used"]) == (4, 4, 0, 0)
        assert (ring["ring_bytes"], ring["connected_shippers"]) == (work.producer.ring_bytes, 1)

        def settled():
            own = _of(supervisor, store)
            return own.get("settled") == store.messages and own

        own = await asyncio.to_thread(wait_for, settled)
        assert own["acked_bytes"] == sum(map(len, work.expected.values()))
        assert (own["rejected"], own["unacked_bytes"], own["streams"]) == (0, 0, 1)
        assert own["ack_lag_seconds"] == 0
    finally:
        await supervisor.stop(DEADLINE)


async def test_a_store_that_owes_an_acknowledgement_shows(
    start_producer, start_store, control_path, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    answers = threading.Event()
    work = Work(start_producer())
    store = start_store(lambda *_: answers.wait(DEADLINE) and None)
    supervisor = ShipperSupervisor([control_path], store.endpoint, 1, folder=tmp_path)
    await supervisor.start()
    try:
        work.publish("capture", range(32))

        def lags():
            own = _of(supervisor, store)
            return own.get("ack_lag_seconds", 0) > 0.5 and own

        shipper = await asyncio.to_thread(wait_for, lags)
        assert (shipper["settled"], shipper["unacked_bytes"]) == (0, sum(map(len, work.expected.values())))
        ring = await asyncio.to_thread(wait_for, lambda: read_figures(figures_path(control_path)))
        assert (ring["under_way"], ring["freed"]) == (1, 0)
        assert ring["bytes_used"] > 0
        answers.set()
        assert await asyncio.to_thread(work.producer.drain, DEADLINE)
    finally:
        answers.set()
        await supervisor.stop(DEADLINE)


def test_nothing_is_left_behind(start_producer, control_path):
    producer = start_producer()
    wait_for(lambda: figures_path(control_path).exists())
    producer.close()
    assert not figures_path(control_path).exists()


def _of(supervisor, store):
    """The only shipper's figures of a store."""
    (status,) = supervisor.status()
    return figures_by_store(status.figures).get(store.endpoint, {})


def _settled(path):
    figures = read_figures(path)
    return figures.get("freed") == 4 and figures
