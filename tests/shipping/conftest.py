"""Fixtures that start and stop stores, producers and shipper processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from inference_svc.shipping.worker.producer import RingProducer
from tests.shipping.support import ENVIRONMENT, ScriptedStore


@pytest.fixture
def start_store():
    stores = []

    def start(script=None, port=0):
        stores.append(ScriptedStore(script, port))
        return stores[-1]

    yield start
    for store in stores:
        store.stop()


@pytest.fixture
def control_path(tmp_path_factory):
    return tmp_path_factory.mktemp("c") / "ring"


@pytest.fixture
def start_producer(control_path):
    producers = []

    def start(ring_bytes=4 << 20, path=control_path, stores=("",)):
        producer = RingProducer(path, ring_bytes=ring_bytes, stores=stores)
        producers.append(producer)
        producer.start()
        return producer

    yield start
    for producer in producers:
        producer.close()


@pytest.fixture
def start_shipper(control_path):
    processes = []

    def start(endpoint, *arguments, paths=(control_path,)):
        command = [sys.executable, "-m", "inference_svc.shipping", "--store", endpoint, *arguments]
        command += [word for path in paths for word in ("--control", str(path))]
        processes.append(subprocess.Popen(command, env=ENVIRONMENT))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
