"""`residuum doctor`: healthy services, and its report of each problem."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import residuum
from residuum.cli.services.doctor import TESTED_VLLM, _examine_stats, _rights, _tested
from residuum.rpc.credentials import TLS, Credentials
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import store_pb2
from residuum.values.replies.service_status import StoreStats
from residuum.wire.placement import StoreAddress
from tests.client.support.shell import command, environment


def findings(out):
    return {line["check"]: line["ok"] for line in map(json.loads, out.splitlines())}


def test_doctor_reports_healthy_services(cli, store):
    code, out, _ = cli("doctor", "--json")
    assert code == 0
    assert findings(out) == {
        "inference service: connection": True,
        "credentials": True,
        "inference service: health": True,
        "model": True,
        "versions": True,
        "inference service: clock": True,
        "inference service: load": True,
        "inference service: store": True,
        "store: connection": True,
        f"store {store.endpoint}: health": True,
        f"store {store.endpoint}: shared memory": True,
        "store answers": True,
        f"store {store.endpoint}: versions": True,
        f"store {store.endpoint}: clock": True,
        f"store {store.endpoint}: room": True,
        f"store {store.endpoint}: disk": True,
    }
    assert not [line for line in map(json.loads, out.splitlines()) if line["warning"]]
    out = cli("doctor")[1]
    assert out.count("ok  ") == 16
    assert re.search(r"store answers: \S+ holds [\d,]+ captures? in [\d.]+ (B|KiB|MiB)\n", out)
    assert f"store {store.endpoint}: shared memory: rows pass through " in out
    assert "it keeps captures until they are deleted" in out
    assert f"the store at {store.endpoint}, version " in out


def test_doctor_names_unreachable_services(cli, peer):
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


def test_doctor_recognises_a_store_in_place_of_the_inference_service(cli, store):
    code, out, _ = cli("doctor", at=store.endpoint)
    assert code == 1
    assert "FAIL  inference service: This is a store, not an inference service" in out
    assert f"name it: --store {store.endpoint}." in out
    assert "health" not in out


def test_doctor_reports_a_loading_service(cli, peer, running_peer):
    running_peer.health.set("", 2)
    peer.script.failures = [Failure(Reason.ERROR_REASON_NOT_SERVING, "Loading.")] * 99
    code, out, _ = cli("doctor", "--json")
    running_peer.health.set("", 1)
    assert code == 1
    assert findings(out) == {
        "inference service: connection": True,
        "credentials": True,
        "inference service: health": False,
        "model": False,  # nothing about the store, whose address is not known yet
    }


def test_doctor_checks_a_named_store(cli, peer, store):
    peer.script.failures = [Failure(Reason.ERROR_REASON_NOT_SERVING, "Loading.")] * 99
    found = findings(cli("doctor", "--json", "--store", store.endpoint)[1])
    assert (found["model"], found["store answers"]) == (False, True)


def test_doctor_detects_another_server_on_the_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        closer = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)], daemon=True)
        closer.start()
        result = subprocess.run(
            command("doctor", "--json", "--endpoint", f"127.0.0.1:{server.getsockname()[1]}", "--timeout", "1"),
            capture_output=True, text=True, env=environment(""), check=False, timeout=60,
        )  # fmt: skip
    assert result.returncode == 1
    assert findings(result.stdout)["inference service: health"] is False


def test_doctor_detects_that_the_inference_service_cannot_reach_the_store(cli, peer, store):
    """The client reaches the store, but the inference service does not."""
    peer.script.store_error = "The store at store:50052 does not answer (no such name)."
    code, out, _ = cli("doctor", "--json")
    assert code == 1
    found = findings(out)
    assert (found["inference service: store"], found["store answers"]) == (False, True)
    assert "FAIL  inference service: store: The store at store:50052 does not answer" in cli("doctor")[1]


@pytest.mark.parametrize(("seconds", "words"), [(-90, "90 s behind"), (90, "90 s ahead of")])
def test_doctor_compares_clocks(cli, peer, seconds, words):
    peer.script.clock_skew = seconds
    code, out, _ = cli("doctor")
    assert code == 0
    assert f"warn  inference service: clock: is {words} this machine's clock" in out


def test_doctor_shows_the_load_and_warns_of_lost_rows(cli, peer, store):
    peer.script.load = {"running_requests": 3, "ring_used_bytes": 1 << 20}
    assert "ok    inference service: load: 3 requests run; 1.0 MiB of 256.0 MiB" in cli("doctor")[1]
    peer.script.load = {"running_requests": 1, "ring_losses": 2}
    code, out, _ = cli("doctor")
    assert code == 0
    assert "warn  inference service: load: 1 request runs;" in out
    assert "rows were lost 2 times" in out


def test_doctor_works_with_older_services(cli, peer, store):
    peer.script.is_old = True
    code, out, _ = cli("doctor", "--json")
    assert code == 0
    found = findings(out)
    assert "inference service: clock" not in found
    assert "inference service: load" not in found
    assert "inference service: store" not in found
    old = StoreStats.from_proto(
        StoreAddress("x:1", "x:1"), store_pb2.GetStatsResponse(server_version=residuum.__version__)
    )
    assert [finding.check for finding in _examine_stats(old, time.time())] == ["store x:1: versions"]


def stats(**fields):
    return replace(
        StoreStats.from_proto(StoreAddress("x:1", "x:1"), store_pb2.GetStatsResponse()),
        max_bytes=100 << 20, append_limit_bytes=80 << 20, used_bytes=1 << 20, disk_bytes=2 << 20,
        free_disk_bytes=1 << 40, server_version=residuum.__version__, **fields,
    )  # fmt: skip


def look(check, **fields):
    (finding,) = [item for item in _examine_stats(replace(stats(), **fields), time.time()) if item.check == check]
    return finding


@pytest.mark.parametrize(
    ("used", "ok", "warning"), [(60, True, False), (69, True, True), (79, False, False), (100, False, False)]
)
def test_doctor_warns_of_a_nearly_full_store(used, ok, warning):
    finding = look("store x:1: room", used_bytes=used << 20)
    assert (finding.ok, finding.warning) == (ok, warning)
    assert ("--retain-bytes" in finding.detail) == (warning or not ok)


def test_doctor_shows_stored_captures():
    finding = look("store x:1: room", retain_seconds=5400.0, retain_bytes=3 << 30)
    assert finding.detail.endswith("it keeps captures for 1.5 h and up to 3.0 GiB in all")


@pytest.mark.parametrize(
    ("free", "disk", "warning"), [(50, 2, True), (99, 2, False), (1, 100, False), (2 << 10, 2, False)]
)
def test_doctor_warns_if_the_disk_fills_before_the_stores_limit(free, disk, warning):
    finding = look("store x:1: disk", free_disk_bytes=free << 20, disk_bytes=disk << 20)
    assert (finding.ok, finding.warning) == (True, warning)


@pytest.mark.parametrize(("free", "used", "ok"), [(0, 1, False), (4, 1, False), (4, 20, True), (20, 1, True)])
def test_doctor_fails_on_a_full_disk(free, used, ok):
    """Space that the store can reuse within its file counts as room, too."""
    finding = look(
        "store x:1: disk", free_disk_bytes=free << 20, disk_bytes=(40 if used == 20 else 2) << 20, used_bytes=used << 20
    )
    assert finding.ok == ok
    assert ("the disk is full" in finding.detail) != ok


@pytest.mark.parametrize("tenant", [None, "alice"])
def test_doctor_fails_if_the_store_says_that_it_is_full(tenant):
    limit = 0 if tenant else 80 << 20
    finding = look("store x:1: full", why_full="the disk is full", tenant=tenant, append_limit_bytes=limit)
    assert not finding.ok
    assert "because the disk is full" in finding.detail
    assert not [item for item in _examine_stats(stats(), time.time()) if item.check == "store x:1: full"]


def test_the_total_of_several_stores_says_which_is_full():
    total = StoreStats.total([replace(stats(), store="a"), replace(stats(), store="b", why_full="the disk is full")])
    assert total.why_full == "b: the disk is full"


def test_doctor_compares_versions_of_the_store():
    assert look("store x:1: versions", server_version="9.9.0").ok is False
    assert look("store x:1: versions", server_version="unknown").ok


@pytest.mark.parametrize(
    ("credentials", "endpoint", "tenant", "words"),
    [
        ({"tls": TLS(cert="c.pem", key="c.key")}, "localhost:1", None, "everyone with a certificate that it accepts"),
        ({"tls": TLS()}, "store.example:1", None, "everyone who can reach it"),
        ({}, "store.example:1", None, "everyone who can reach it"),
        ({}, "localhost:1", None, ""),
        ({"tls": TLS(), "token": "an-admins"}, "store.example:1", None, ""),
        ({"tls": TLS(cert="c.pem", key="c.key")}, "store.example:1", "alice", ""),
    ],
)
def test_doctor_warns_of_a_store_without_access_control(credentials, endpoint, tenant, words):
    found = list(_rights(Credentials(**credentials), replace(stats(), endpoint=endpoint, tenant=tenant)))
    assert len(found) == bool(words)
    for finding in found:
        assert (finding.ok, finding.warning) == (True, True)
        assert words in finding.detail
        assert "--tokens" in finding.detail


def test_doctor_suspects_a_loopback_address_of_another_machine():
    from residuum.cli.services.doctor import _hint

    assert "--store" in _hint("127.0.0.1:50052", "gpu-host:50051")
    assert _hint("127.0.0.1:50052", "localhost:50051") == ""
    assert _hint("gpu-host:50052", "gpu-host:50051") == ""


def test_doctor_says_whether_the_version_of_vllm_was_tested():
    assert _tested("0.32.0") == _tested("0.32.0+cpu") == ""
    assert _tested("0.31.0") == " (not tested, as 0.24.0, 0.32.0 and 0.33.0 were)"
    results = (Path(__file__).parents[3] / "bench" / "results" / "h200").glob("conformance*.json")
    assert {json.loads(file.read_text())["versions"]["vllm"] for file in results} == set(TESTED_VLLM)
