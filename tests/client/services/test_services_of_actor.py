"""The program that an actor of Ray runs: a real store, and a scripted inference service instead of vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import residuum

pytestmark = pytest.mark.slow  # it starts many processes

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from svc_common import serve_command, services_of_actor
services_of_actor._INFERENCE, serve_command._NEEDED = "tests.client.support.scripted_inference", ("lmdb",)
sys.exit(serve_command.serve_for_actor())
"""
PLAN = {"model": "peer", "host": "127.0.0.1", "token": "secret-7", "store": "", "flags": []}


@contextmanager
def started(scratch, **plan):
    """Runs the program, with its temporary files in a folder."""
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(json.dumps({**PLAN, **plan}).encode() + b"\n")
        process.stdin.flush()
        yield process
    assert services_in(scratch) == {}
    assert list(scratch.glob("residuum-*/*.log")) == []


def answer_of(process):
    return json.loads(process.stdout.readline())


def services_in(scratch):
    """Return the processes of services whose files are in the folder, by their names."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it has ended
            continue
        if os.fsencode(scratch) in command:
            found["store" if b"store_svc" in command else "inference"] = int(path.parent.name)
    return found


@pytest.mark.parametrize("end", ["stop", "death"])
def test_they_end_when_the_actor_does(tmp_path, end):
    with started(tmp_path / "scratch") as process:
        with residuum.Client(answer_of(process)["inference"]) as client:
            assert client.health().inference == "SERVING"
        assert sorted(services_in(tmp_path / "scratch")) == ["inference", "store"]
        if end == "stop":
            process.stdin.write(b"stop\n")
            process.stdin.flush()
        else:
            process.stdin.close()
        assert process.wait(30) == 0


def test_the_store_answers_only_to_the_token(tmp_path):
    with started(tmp_path / "scratch") as process:
        inference = answer_of(process)["inference"]
        port = next((tmp_path / "scratch").glob("residuum-*/store.port")).read_text()
        for token, is_right in (("secret-7", True), ("secret-8", False)):
            with residuum.Client(inference, store=f"127.0.0.1:{port}", token=token) as client:
                if is_right:
                    assert list(client.captures()) == []
                else:
                    with pytest.raises(residuum.Unauthenticated):
                        list(client.captures())
        process.stdin.close()


def test_the_actor_may_die_while_the_model_is_loading(tmp_path):
    with started(tmp_path / "scratch", model="never") as process:
        until = time.monotonic() + 60
        while "inference" not in services_in(tmp_path / "scratch"):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.stdin.close()
        assert process.wait(30) == 0
        assert process.stdout.read() == b""


def test_a_given_store_is_used(tmp_path):
    with started(tmp_path / "scratch", store="127.0.0.1:1") as process:
        assert "inference" in answer_of(process)
        assert list(services_in(tmp_path / "scratch")) == ["inference"]
        process.stdin.close()


@pytest.mark.parametrize("victim", ["store", "inference"])
def test_a_service_that_dies_ends_the_other(tmp_path, victim):
    with started(tmp_path / "scratch") as process:
        answer_of(process)
        os.kill(services_in(tmp_path / "scratch")[victim], signal.SIGKILL)
        assert answer_of(process) == {"inference": ""}, "the actor learns at once that nothing serves here"
        assert f"The {victim} service has ended" in answer_of(process)["failed"]
        assert process.wait(30) == 1


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"model": "/no/model"}, "the model folder /no/model does not exist"),
        ({"flags": ["--listen=0.0.0.0:1"]}, "sets --listen itself"),
        ({"flags": ["--no-such-flag"]}, "--no-such-flag"),
        ({"flags": ["--tls-cert=cert.pem", "--tls-key=cert.key"]}, "Leave out --tls-cert"),
    ],
)
def test_what_cannot_start(tmp_path, plan, why):
    with started(tmp_path / "scratch", **plan) as process:
        assert why in answer_of(process)["failed"]
        assert process.wait(30) == 1


def test_tls_of_the_nodes_environment_is_refused_because_the_actor_would_wait_for_ever(tmp_path, monkeypatch):
    for name in ("cert", "key"):
        monkeypatch.setenv(f"RESIDUUM_TLS_{name.upper()}", f"{name}.pem")
    with started(tmp_path / "scratch") as process:
        assert "without TLS" in answer_of(process)["failed"]
        assert process.wait(30) == 1


def test_the_settings_file_of_the_nodes_environment_is_not_the_stores(tmp_path, monkeypatch):
    (tmp_path / "inference.toml").write_text("max-num-seqs = 32")
    monkeypatch.setenv("RESIDUUM_CONFIG", str(tmp_path / "inference.toml"))
    with started(tmp_path / "scratch") as process:
        assert answer_of(process)["inference"]
        process.stdin.close()
