"""A worker ends with the processes that it belongs to."""

from __future__ import annotations

import subprocess
import sys

from examples.services import ROOT

_WORKER = """
import sys, time
from inference_svc.taps import watchdog
watchdog._GRACE_SECONDS = 0.1
watchdog.end_with({int(sys.argv[1])})
print("watching", flush=True)
time.sleep(600)  # a step that waits for the store for ever
"""


def test_it_ends_when_its_service_is_killed() -> None:
    service = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(service.pid)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"watching\n"
        service.kill()  # not waited for yet: a zombie has ended as well
        assert worker.wait(30) == 1
    finally:
        service.kill()
        service.wait()
        worker.kill()
        worker.wait()


def test_it_ends_when_its_service_has_ended_already() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    worker = subprocess.run(
        [sys.executable, "-c", _WORKER, str(gone.pid)], cwd=ROOT, check=False, capture_output=True, timeout=30
    )
    assert worker.returncode == 1
