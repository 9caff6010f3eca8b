"""`residuum.ray.serve`: services that cannot start, and those that do: they serve, are started again, and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from jobs import CAPTURE, TEXTS, check_rows, command_of
from pyarrow import dataset as tables
from pyarrow import parquet

import residuum
import residuum.ray

ROOT = Path(__file__).parents[2]
PYTHON = str(ROOT / ".venv" / "bin" / "python")


@pytest.mark.parametrize("numbers", [{"services": 0}, {"num_gpus": -1}, {"num_cpus": -0.5}])
def test_numbers_that_start_nothing(cluster, numbers):
    (name,) = numbers
    with pytest.raises(residuum.InvalidRequest, match=name), residuum.ray.serve("model", **numbers):
        pass


def test_a_cluster_without_room_is_an_error_and_no_wait(cluster):
    with (
        pytest.raises(residuum.InvalidRequest, match=r"1 GPUs and 0 CPUs. The cluster has 0 GPUs.*num_gpus=0"),
        residuum.ray.serve("model", node_timeout=1),
    ):
        pass
    with (
        pytest.raises(residuum.InvalidRequest, match=r"of 3 services had no place within 10 s.*Start fewer services"),
        residuum.ray.serve("model", services=3, num_gpus=0, num_cpus=1, node_timeout=10),
    ):
        pass


def test_a_node_without_the_package(cluster):
    with (
        pytest.raises(residuum.ResiduumError, match=r"on the node .*the services are not installed.*residuum-server"),
        residuum.ray.serve("model", num_gpus=0),
    ):
        pass


def test_a_node_without_that_python(cluster):
    with (
        pytest.raises(residuum.ResiduumError, match=r"on the node .*/no/python cannot be started"),
        residuum.ray.serve("model", num_gpus=0, python="/no/python"),
    ):
        pass


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [("/no/model", {}, "the model folder /no/model does not exist"), ("model", {"listen": "0.0.0.0:1"}, "--listen")],
)
def test_services_that_do_not_start(cluster, model, settings, why):
    with (
        pytest.raises(residuum.ResiduumError, match=rf"on the node .*{why}"),
        residuum.ray.serve(model, num_gpus=0, python=PYTHON, **settings),
    ):
        pass


@pytest.fixture(scope="module")
def own(cluster, services):
    """Two services in actors, each with a store."""
    before = service_processes()
    with residuum.ray.serve(
        services["model"], services=2, num_gpus=0, python=PYTHON, max_restarts=-1, **services["settings"]
    ) as own:
        yield own
    assert service_processes() == before, "no service is left when the block has ended"


def service_processes():
    """Return the processes of inference services on this machine."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid for pid in pids if b"\0-m\0inference_svc\0" in command_of(pid)}


def test_rows_equal_those_of_given_endpoints(own, client, tmp_path):
    prompts = ray.data.from_items([{"text": text, "id": at} for at, text in enumerate(TEXTS)])
    rows = residuum.ray.extract(prompts, own, capture=CAPTURE, keep="id", batch_size=16)
    rows.write_parquet(str(tmp_path / "rows"))
    check_rows(parquet.read_table(tmp_path / "rows"), client, tmp_path / "reference")
    for number in range(2):
        with own.client(number) as one:
            assert one.info().load.prompt_tokens > 0, "both have taken part"
            assert list(one.captures(prefix="ray-")) == []


def test_they_answer_only_to_the_token_of_the_job(own):
    with residuum.Client(own.endpoints[0], token="") as stranger, pytest.raises(residuum.Unauthenticated):
        stranger.info()
    assert own.settings["token"] not in repr(own)


def test_they_have_their_own_credentials(own):
    prompts = ray.data.from_items([{"text": "a"}])
    for name, value in {"store": "127.0.0.1:1", "token": "t", "tls": True, "insecure": True}.items():
        with pytest.raises(residuum.InvalidRequest, match=f"{name}= cannot be given"):
            residuum.ray.extract(prompts, own, capture=CAPTURE, **{name: value})


@pytest.mark.parametrize("victim", ["actor", "service"])
def test_one_that_dies_loses_and_doubles_nothing_and_comes_back(own, client, tmp_path, victim):
    texts = TEXTS * 5
    before, first = service_processes(), own.endpoints[0]
    rows = residuum.ray.extract(
        ray.data.from_items([{"text": text, "id": at} for at, text in enumerate(texts)]), own,
        capture=CAPTURE, keep="id", batch_size=32, max_concurrency=8, timeout=120,
    )  # fmt: skip
    killed = []

    def kill():
        with own.client(0) as one:
            port = one.endpoint.rpartition(":")[2]
            until = time.monotonic() + 60
            while not list(one.captures(prefix="ray-")) and time.monotonic() < until:
                time.sleep(0.01)
        if victim == "actor":
            ray.kill(own.actors[0], no_restart=False)
        else:
            (pid,) = (pid for pid in before if listens(pid, port))
            os.kill(pid, signal.SIGKILL)
        killed.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    rows.write_parquet(str(tmp_path / "rows"))
    assert killed, "the job was over before the service was killed"
    killer.join()
    table = parquet.read_table(tmp_path / "rows")
    assert table["error"].null_count == len(table)
    check_rows(table, client, tmp_path / "reference", texts)
    wait_for(lambda: len(own.endpoints) == 2 and first not in own.endpoints, 200)
    after = service_processes()
    assert len(before - after) == len(after - before) == 1, "the old service has ended, and a new one runs"


def test_a_service_that_does_not_serve_has_no_client(cluster):
    @ray.remote(num_cpus=0)
    class Starting:
        def address(self):
            return ""

    services = residuum.ray.RayServices([Starting.remote(), Starting.remote()], ("127.0.0.1:1", "127.0.0.1:2"), {})
    assert services.endpoints == []
    with pytest.raises(residuum.Unavailable, match="Service 1 of 2 does not serve"):
        services.client(1)


def listens(pid, port):
    """Tell whether a service has written this port to its file."""
    arguments = command_of(pid).split(b"\0")
    if b"--port-file" not in arguments:
        return False
    return Path(os.fsdecode(arguments[arguments.index(b"--port-file") + 1])).read_text().strip() == port


def wait_for(is_so, seconds):
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"not so after {seconds} s"
        time.sleep(0.2)


def test_the_command_starts_services_and_ends_them(services, client, tmp_path):
    before = service_processes()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text, "id": at}) + "\n" for at, text in enumerate(TEXTS)))
    flags = "--enforce-eager --max-model-len=128 --kv-cache-gib=0.25 --ring-mib=32"
    done = subprocess.run(
        [sys.executable, "-m", "residuum", "extract", str(prompts), "--output", str(tmp_path / "rows"), "--capture",
         "0,2", "--keep", "id", "--ray", "local", "--serve", services["model"], "--gpus", "0", "--python", PYTHON,
         "--serve-flags", flags],
        check=False, capture_output=True, text=True, timeout=400, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 prompts failed" in done.stdout
    check_rows(tables.dataset(tmp_path / "rows").to_table(), client, tmp_path / "reference")
    assert service_processes() == before


PROGRAM = """
import json, sys, time
import ray, residuum.ray
ray.init(num_cpus=1, include_dashboard=False)
settings = json.loads(sys.argv[3])
with residuum.ray.serve(sys.argv[1], num_gpus=0, python=sys.argv[2], **settings) as services:
    print("serving", flush=True)
    time.sleep(600)
"""


def test_they_end_if_the_program_dies(services):
    before = service_processes()
    arguments = [services["model"], PYTHON, json.dumps(services["settings"])]
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True) as program:
        assert any("serving" in line for line in program.stdout)
        assert len(service_processes()) == len(before) + 1
        program.kill()
        wait_for(lambda: service_processes() == before, 60)
