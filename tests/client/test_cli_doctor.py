"""`residuum doctor`: what is well, and what is said of what is not."""

from __future__ import annotations

import json
import socket
import subprocess
import threading

from shell import command, environment

from residuum.rpc.errors import Failure, Reason


def findings(out):
    return {line["check"]: line["ok"] for line in map(json.loads, out.splitlines())}


def test_doctor_finds_all_well(cli, store):
    code, out, _ = cli("doctor", "--json")
    assert code == 0
    assert findings(out) == {
        "inference service: connection": True,
        "inference service: health": True,
        "model": True,
        "versions": True,
        "store: connection": True,
        f"store {store.endpoint}: health": True,
        "store answers": True,
    }
    assert cli("doctor")[1].count("ok  ") == 7


def test_doctor_names_what_is_away(cli, peer):
    code, out, _ = cli("doctor", at="127.0.0.1:1")
    assert code == 1
    assert "FAIL  inference service: connection: 127.0.0.1:1" in out
    assert "FAIL  inference service: address" in cli("doctor", at="no-such-host.invalid:1")[1]
    peer.script.store_endpoints = ["127.0.0.1:1"]
    code, out, _ = cli("doctor")
    assert code == 1
    assert "FAIL  store: connection: 127.0.0.1:1" in out
    peer.script.store_endpoints = []
    assert "FAIL  store: The inference service" in cli("doctor")[1]


def test_doctor_sees_a_service_that_loads(cli, peer, running_peer):
    running_peer.health.set("", 2)
    peer.script.failures = [Failure(Reason.ERROR_REASON_NOT_SERVING, "Loading.")] * 99
    code, out, _ = cli("doctor", "--json")
    running_peer.health.set("", 1)
    assert code == 1
    assert findings(out) == {
        "inference service: connection": True,
        "inference service: health": False,
        "model": False,  # and no word about the store, which nobody could name yet
    }


def test_doctor_looks_at_a_store_that_was_named(cli, peer, store):
    peer.script.failures = [Failure(Reason.ERROR_REASON_NOT_SERVING, "Loading.")] * 99
    found = findings(cli("doctor", "--json", "--store", store.endpoint)[1])
    assert (found["model"], found["store answers"]) == (False, True)


def test_doctor_sees_that_something_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        closer = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)], daemon=True)
        closer.start()
        result = subprocess.run(
            command("doctor", "--json", "--endpoint", f"127.0.0.1:{server.getsockname()[1]}", "--timeout", "1"),
            capture_output=True, text=True, env=environment(""), check=False, timeout=60,
        )  # fmt: skip
    assert result.returncode == 1
    assert findings(result.stdout)["inference service: health"] is False


def test_doctor_suspects_an_address_of_the_other_machines_own():
    from residuum.cli.doctor import _hint

    assert "--store" in _hint("127.0.0.1:50052", "gpu-host:50051")
    assert _hint("127.0.0.1:50052", "localhost:50051") == ""
    assert _hint("gpu-host:50052", "gpu-host:50051") == ""
