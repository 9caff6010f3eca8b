"""The metrics and logs of both services, with a real engine, shipper and store."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

import residuum
from residuum.cli import main
from tests.observing import log_lines, metrics

if TYPE_CHECKING:
    from svc_common.launcher import Service

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

DEADLINE = 30.0


def test_metrics_count_a_captured_request(services: tuple[Service, Service], client: residuum.Client) -> None:
    store, inference = services
    before = metrics(inference), metrics(store)
    reply = client.generate("The capital of France is", max_tokens=8, capture=residuum.Capture(), request_id="watched")
    acts = client.activations(reply.request_id)
    rows = acts.manifest.num_rows * acts.hidden_size * 2
    where = client.store_endpoints()[0]
    acked = "residuum_inference_shipper_acked_bytes_total", "0", where
    deadline = time.monotonic() + DEADLINE
    while True:  # workers and shippers report once a second
        now = metrics(inference), metrics(store)
        settled = now[0].get(acked, 0.0) - before[0].get(acked, 0.0) >= rows
        if settled and now[0].get(("residuum_inference_ring_used_bytes", "0")) == 0:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)

    def grown(at: int, *name: str) -> float:
        return now[at][name] - before[at].get(name, 0.0)

    assert grown(0, "residuum_inference_requests_total", "finished") == 1
    assert grown(0, "residuum_inference_generated_tokens_total") == len(reply.token_ids)
    assert grown(0, "residuum_inference_prompt_tokens_total") == len(reply.prompt_token_ids)
    assert grown(0, "residuum_inference_first_token_seconds_count") == 1
    assert now[0]["residuum_inference_open_captures", where] == 0
    assert now[0]["residuum_inference_ring_extents", "0"] == 0
    assert now[0]["residuum_inference_ring_bytes", "0"] >= 256 << 20
    assert now[0]["residuum_inference_shipper_up", "0"] == 1
    assert grown(1, "residuum_store_captures", "complete") == 1
    assert grown(1, "residuum_store_written_bytes_total") >= rows
    assert grown(1, "residuum_store_read_bytes_total") >= rows
    assert not grown(1, "residuum_store_appended_chunks_total", "rejected")


def test_the_request_id_is_in_both_logs(services: tuple[Service, Service], client: residuum.Client) -> None:
    client.generate("The capital of Italy is", max_tokens=2, capture=residuum.Capture(layers=[3]), request_id="traced")
    client.activations("traced")

    def told() -> list[list[str]]:
        return [[line["event"] for line in log_lines(item) if line.get("request_id") == "traced"] for item in services]

    deadline = time.monotonic() + DEADLINE
    while not all(told()) and time.monotonic() < deadline:  # the store logs an end after its readers know of it
        time.sleep(0.05)
    assert told() == [["capture ended"], ["request ended"]]


def test_the_doctor_captures_and_reads_a_request(
    services: tuple[Service, Service], capsys: pytest.CaptureFixture[str], client: residuum.Client
) -> None:
    assert client.info(check_store=True).store_reachable is True
    assert main(["doctor", "--json", "--endpoint", services[1].endpoint]) == 0
    found = {line["check"]: line["ok"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["inference service: store"]
    assert found[f"store {services[0].endpoint}: room"]
