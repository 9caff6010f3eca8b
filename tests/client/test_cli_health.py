"""`residuum health`: the exit code that a container's health check reads."""

from __future__ import annotations

import json
import socket

import pytest

from residuum.cli import main


@pytest.fixture
def health(capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def run(endpoint, *arguments):
        code = main(["health", "--endpoint", endpoint, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_both_services_answer(health, endpoint, store):
    assert health(endpoint) == (0, f"{endpoint}\tSERVING\n", "")
    assert health(store.endpoint) == (0, f"{store.endpoint}\tSERVING\n", "")


def test_for_programs(health, endpoint):
    code, out, _ = health(endpoint, "--json")
    assert (code, json.loads(out)) == (0, {"endpoint": endpoint, "status": "SERVING"})


def test_a_service_that_loads(health, endpoint, running_peer):
    running_peer.health.set("", 2)
    try:
        assert health(endpoint)[:2] == (1, f"{endpoint}\tNOT_SERVING\n")
    finally:
        running_peer.health.set("", 1)


def test_only_the_service_that_is_asked_counts(health, endpoint, peer):
    peer.script.store_endpoints = ["127.0.0.1:1"]
    assert health(endpoint)[0] == 0


def test_nothing_listens(health):
    assert health("127.0.0.1:1")[:2] == (1, "127.0.0.1:1\tUNREACHABLE\n")
    code, out, err = health("nonsense")
    assert (code, out) == (1, "")
    assert "host:port" in err


def test_what_listens_does_not_answer(health):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        assert health(endpoint, "--timeout", "0.5")[:2] == (1, f"{endpoint}\tUNREACHABLE\n")
