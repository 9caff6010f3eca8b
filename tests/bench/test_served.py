"""The servers that the benchmark of the service starts: their ports, and their end."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.processes import _has_members
from bench.service.served import _hold_port

ROOT = Path(__file__).parents[2]

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


def test_a_held_port_is_for_the_server_alone():
    with _hold_port() as place:
        address = place.getsockname()
        with socket.socket() as other, pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared
            other.bind(address)
        assert caught.value.errno == errno.EADDRINUSE
        with socket.create_server(address), socket.create_connection(address, timeout=5):
            pass


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


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
