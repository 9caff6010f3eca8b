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


def test_json_output_for_programs(health, endpoint):
    code, out, _ = health(endpoint, "--json")
    assert (code, json.loads(out)) == (0, {"endpoint": endpoint, "status": "SERVING"})


@pytest.mark.parametrize("name", ["store", "residuum.v1.StoreService", "grpc.health.v1.Health", "nonsense"])
def test_one_service_can_be_checked_by_name(health, endpoint, store, name):
    is_store = name in {"store", "residuum.v1.StoreService"}
    expected = (0, f"{store.endpoint}\tSERVING\n") if is_store else (1, f"{store.endpoint}\tSERVICE_UNKNOWN\n")
    assert health(store.endpoint, "--service", name)[:2] == expected
    # The server on the other port is healthy, but it is not the named service.
    assert health(endpoint, "--service", name)[:2] == (1, f"{endpoint}\tSERVICE_UNKNOWN\n")


def test_a_service_by_its_name_while_another_of_the_server_loads(health, endpoint, running_peer):
    running_peer.health.set("residuum.v1.InferenceService", 2)
    try:
        assert health(endpoint, "--service", "inference")[:2] == (1, f"{endpoint}\tNOT_SERVING\n")
        assert health(endpoint)[0] == 0
        running_peer.health.set("residuum.v1.InferenceService", 1)
        assert health(endpoint, "--service", "inference")[:2] == (0, f"{endpoint}\tSERVING\n")
    finally:
        running_peer.health.set("residuum.v1.InferenceService", 1)


def test_a_loading_service_is_not_healthy(health, endpoint, running_peer):
    running_peer.health.set("", 2)
    try:
        assert health(endpoint)[:2] == (1, f"{endpoint}\tNOT_SERVING\n")
    finally:
        running_peer.health.set("", 1)


def test_only_the_named_service_counts(health, endpoint, peer):
    peer.script.store_endpoints = ["127.0.0.1:1"]
    assert health(endpoint)[0] == 0


def test_nothing_listens(health):
    assert health("127.0.0.1:1")[:2] == (1, "127.0.0.1:1\tUNREACHABLE\n")
    code, out, err = health("nonsense")
    assert (code, out) == (1, "")
    assert "host:port" in err


@pytest.mark.parametrize("arguments", [("--timeout", "0"), ("--timeout", "soon"), ("--nonsense",)])
def test_a_wrong_command_line_is_refused(health, endpoint, arguments):
    with pytest.raises(SystemExit) as ended:
        health(endpoint, *arguments)
    assert ended.value.code == 2


def test_a_server_that_does_not_answer_is_unhealthy(health):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        assert health(endpoint, "--timeout", "0.5")[:2] == (1, f"{endpoint}\tUNREACHABLE\n")


def test_a_timeout_beyond_all_clocks_is_no_limit(cli):
    assert cli("health", "--timeout", "1e10")[0] == 0
