"""The servers that the benchmark of the service starts: their ports, and their end."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processes import _has_members
from bench.service.served import _hold_port
from svc_common.launcher import OWN_GROUP
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]

SERVER = """
import subprocess, time
from bench.service.vllm_server import end_with_starter
end_with_starter()
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""
BENCH = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from bench.service import served
served.sys = SimpleNamespace(executable=sys.argv[1])
server = served._start("stock", {"model": "m"}, Path(sys.argv[2]), dict(served.os.environ))
print(server.process.pid, flush=True)
time.sleep(600)
"""


def test_only_a_socket_that_sets_reuseaddr_can_bind_a_held_port_and_listen():
    with _hold_port() as held:
        address = held.getsockname()
        with socket.socket() as other, pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared
            other.bind(address)
        assert caught.value.errno == errno.EADDRINUSE
        with socket.create_server(address), socket.create_connection(address, timeout=5):
            pass


@pytest.mark.parametrize("is_leader", [True, False])
def test_a_server_whose_input_ends_kills_only_a_group_of_its_own(is_leader):
    """The caller's group has a shell in it, for example. What comes through standard input is no end."""
    group = OWN_GROUP if is_leader else {}
    caller = (
        "import subprocess, sys\n"
        f"server = subprocess.Popen([sys.executable, '-c', {SERVER!r}], stdin=subprocess.PIPE, "
        f"stdout=subprocess.PIPE, **{group})\n"
        "print(server.stdout.readline().decode(), flush=True)\n"
        "server.stdin.write(b'x')\n"
        "server.stdin.flush()\n"
        "try:\n"
        "    server.wait(0.5)\n"
        "except subprocess.TimeoutExpired:\n"
        "    print('lives', flush=True)\n"
        "server.stdin.close()\n"
        "print(server.wait(20), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", caller], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        told = running.communicate(timeout=60)[0].split()
    engine = int(told[0])
    try:
        assert told[1:] == ["lives", str(-signal.SIGKILL if is_leader else 1)]
        assert running.returncode == 0, "the caller lives"
        if is_leader:
            wait_for(lambda: has_ended(engine))
        assert has_ended(engine) == is_leader
    finally:
        if not has_ended(engine):
            os.kill(engine, signal.SIGKILL)


def test_a_server_and_its_engines_end_with_a_benchmark_that_is_killed(tmp_path):
    stand_in, log = tmp_path / "python", tmp_path / "server.log"
    stand_in.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(SERVER)}\n")
    stand_in.chmod(0o700)
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH, str(stand_in), str(log)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    group = int(bench.stdout.readline())
    try:
        wait_for(lambda: log.read_text().strip().isdecimal())
        assert _has_members(group)
        bench.kill()
        wait_for(lambda: not _has_members(group))
    finally:
        bench.kill()
        bench.wait()
        bench.stdout.close()
        if _has_members(group):
            os.killpg(group, signal.SIGKILL)


def has_ended(pid):
    """Whether a process has ended, also if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
