"""Ray, and two real inference services on a tiny model. `make test-ray` makes Ray's environment."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = str(ROOT / "client")
sys.path.insert(0, CLIENT)

if importlib.util.find_spec("ray") is None:  # `make test-ray` fails if it then finds no test
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def services(tmp_path_factory):
    """The addresses of a store, its archive and two inference services."""
    folder = tmp_path_factory.mktemp("services")
    log = folder / "services.log"
    process = subprocess.Popen(
        [str(ROOT / ".venv" / "bin" / "python"), "-m", "tests.ray.services", str(folder)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{CLIENT}:{ROOT}"}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"),
    )  # fmt: skip
    line = process.stdout.readline()
    assert line, log.read_text()[-3000:]
    yield json.loads(line)
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture(scope="session")
def cluster():
    """Ray on this machine."""
    import ray

    os.environ["PYTHONPATH"] = CLIENT
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, logging_level="warning")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield context
    ray.shutdown()


@pytest.fixture
def client(services):
    import residuum

    with residuum.Client(services["inference"][0], timeout=30) as client:
        yield client
