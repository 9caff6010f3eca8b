"""A worker ends with the processes that it depends on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from svc_common.launcher import ROOT

_WORKER = """
import os, sys, time
from inference_svc.taps.vllm import watchdog
watchdog._GRACE_SECONDS = watchdog._POLL_SECONDS = 0.1
if "sandbox" in sys.argv:
    def refuse(pid):
        raise PermissionError(1, "Operation not permitted")
    os.pidfd_open = refuse
watchdog.end_with({int(sys.argv[1])})
print("watching", file=sys.stderr, flush=True)  # stdout has the log
time.sleep(600)  # a step that waits for the store for ever
"""


@pytest.mark.parametrize("place", ["host", "sandbox"])
def test_a_worker_ends_when_its_service_is_killed(place: str) -> None:
    service = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(service.pid), place],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        assert worker.stderr is not None
        assert b"watching\n" in worker.stderr
        service.kill()  # not waited for yet: a zombie counts as ended
        assert worker.wait(30) == 1
    finally:
        service.kill()
        service.wait()
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("place", ["host", "sandbox"])
def test_a_worker_ends_if_its_service_has_already_ended(place: str) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    worker = subprocess.run(
        [sys.executable, "-c", _WORKER, str(gone.pid), place], cwd=ROOT, check=False, capture_output=True, timeout=30
    )
    assert worker.returncode == 1
