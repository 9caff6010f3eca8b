from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inference_svc.shipping.supervisor import ShipperSupervisor
from tests.shipping.support import DEADLINE, ENVIRONMENT, Work
from tests.waiting import wait_for

PARENT = """
import asyncio, sys
from inference_svc.shipping.supervisor import ShipperSupervisor
from svc_common.logs import configure_logs

async def run():
    configure_logs()  # to stderr: stdout is for the test
    supervisor = ShipperSupervisor([sys.argv[1]], "127.0.0.1:1", count=2, arguments=["--grace", "0.1"])
    await supervisor.start()
    print(*(status.pid for status in supervisor.status()), flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def niceness_of_threads(pid):
    """Threads may end at any time, even while a test looks at them."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return found


async def until(condition):
    await asyncio.to_thread(wait_for, condition)


@pytest.fixture
async def start_supervisor(control_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    supervisors = []

    async def start(endpoint, count, *arguments):
        supervisors.append(ShipperSupervisor([control_path], endpoint, count, arguments=arguments))
        await supervisors[-1].start()
        return supervisors[-1]

    yield start
    for supervisor in supervisors:
        await supervisor.stop(grace_seconds=0.1)


async def test_a_killed_shipper_is_started_again_and_nothing_is_missing(start_producer, start_store, start_supervisor):
    work, store = Work(start_producer()), start_store()
    supervisor = await start_supervisor(store.endpoint, 1)
    (before,) = supervisor.status()
    assert before.restarts == 0
    await until(lambda: work.producer.stats().connected_shippers == 1)
    os.kill(before.pid, signal.SIGKILL)
    work.publish("capture", range(32))
    assert await asyncio.to_thread(work.producer.drain, DEADLINE)
    (after,) = supervisor.status()
    assert after.pid != before.pid
    assert after.restarts == 1
    assert store.rows == work.expected


async def test_stopping_delivers_items_and_ends_every_process(start_producer, start_store, start_supervisor):
    work, store = Work(start_producer()), start_store()
    supervisor = await start_supervisor(store.endpoint, 2)
    pids = [status.pid for status in supervisor.status()]
    await until(lambda: work.producer.stats().connected_shippers == 2)
    for number in range(32):
        work.publish(f"capture-{number}", range(32))
    await until(lambda: work.producer.stats().freed)
    await supervisor.stop(grace_seconds=DEADLINE)
    assert not any(map(is_running, pids))
    assert [status.pid for status in supervisor.status()] == [None, None]
    assert [status.restarts for status in supervisor.status()] == [0, 0]
    await supervisor.stop(grace_seconds=DEADLINE)


async def test_signals_to_the_parents_group_do_not_reach_shippers_of_its_session(
    start_producer, start_supervisor, start_store
):
    """In another session, niceness would have no effect on the engine; see autogroup in sched(7)."""
    producer = start_producer()
    supervisor = await start_supervisor(start_store().endpoint, 1)
    await until(lambda: producer.stats().connected_shippers == 1)
    (status,) = supervisor.status()
    assert os.getpgid(status.pid) == status.pid != os.getpgid(0)
    assert os.getsid(status.pid) == os.getsid(0)


async def test_a_shipper_that_outlasts_the_grace_is_killed(start_producer, start_supervisor, start_store):
    producer = start_producer()
    supervisor = await start_supervisor(start_store().endpoint, 1)
    await until(lambda: producer.stats().connected_shippers == 1)
    (status,) = supervisor.status()
    os.kill(status.pid, signal.SIGSTOP)
    await supervisor.stop(grace_seconds=0.1)
    assert not is_running(status.pid)


async def test_a_failing_shipper_is_restarted_with_growing_delays_and_can_be_stopped(start_supervisor):
    supervisor = await start_supervisor("127.0.0.1:1", 1, "--no-such-option")
    await until(lambda: supervisor.status()[0].restarts >= 1)
    await supervisor.stop(grace_seconds=DEADLINE)
    assert supervisor.status()[0].pid is None


def test_no_shipper_outlives_a_killed_parent(control_path):
    command = [sys.executable, "-c", PARENT, str(control_path)]
    parent = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE)
    pids = []
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
    finally:
        parent.kill()
        parent.communicate()
    wait_for(lambda: not any(map(is_running, pids)), "the end of the shippers")


async def test_shippers_give_way_to_the_engine(start_producer, start_supervisor, start_store):
    start_producer()
    supervisor = await start_supervisor(start_store().endpoint, 1, "--nice", "7")
    (shipper,) = supervisor.status()
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
    await until(lambda: niceness_of_threads(shipper.pid) == {expected})


TERMINAL = """
import os, pty, subprocess, sys, termios, time
leader, follower = pty.openpty()
os.setsid()
import fcntl
fcntl.ioctl(follower, termios.TIOCSCTTY, 0)
attributes = termios.tcgetattr(follower)
attributes[3] |= termios.TOSTOP
termios.tcsetattr(follower, termios.TCSANOW, attributes)
flags = ["--control", sys.argv[1], "--store", "127.0.0.1:1", "--parent-pid", str(os.getpid())]
child = subprocess.Popen([sys.executable, "-m", "inference_svc.shipping", *flags], stderr=follower)
said = os.read(leader, 1)
print(open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[0])
child.kill()
child.wait()
"""


def test_a_terminal_with_tostop_does_not_stop_a_shipper(tmp_path):
    command = [sys.executable, "-c", TERMINAL, str(tmp_path / "ring")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.stdout.strip() in set("RSD"), (done.stdout, done.stderr)
