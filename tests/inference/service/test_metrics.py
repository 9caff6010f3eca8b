"""The service's metrics in a scrape, and its log lines for requests."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from itertools import product
from types import SimpleNamespace

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.contextvars import get_contextvars, merge_contextvars
from structlog.testing import capture_logs

from inference_svc.engine.streams import Delta
from inference_svc.load import service_load
from inference_svc.shipping.figures import figures_path
from inference_svc.shipping.metrics import ShippingCollector
from inference_svc.shipping.supervisor import ShipperStatus
from residuum.rpc.errors import Reason
from residuum.v1 import inference_pb2
from svc_common.rpc.metrics import MetricsListener, make_registry
from svc_common.security.access import set_caller
from svc_common.security.tokens_file import Caller, Right
from tests.inference.service_support import (
    ADD_JOY,
    CAPTURE,
    DEADLINE,
    JOY,
    ask,
    failure_of,
    spec,
    stuck_after,
)


def samples(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def scrape(service):
    listener = MetricsListener("127.0.0.1:0", service.metrics.registry)

    async def look():
        """Scrape in a thread, like the listener's threads, so that the event loop continues."""
        return await asyncio.to_thread(samples, listener.port)

    yield look
    listener.close()


FAULTY = [method.name for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods]
"""The methods in which the service may have a bug."""


def some(found, expected):
    return {name: found.get(name) for name in expected}


async def poll(condition):
    """Poll for a condition that has no event to wait for."""
    end = time.monotonic() + DEADLINE
    while not await condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def until(look, name, value):
    async def is_so():
        return (await look()).get(name) == value

    await poll(is_so)


async def logged(lines, event, count=1):
    """Wait for log lines of an event and return them."""

    async def is_so():
        return len(of(lines, event)) >= count

    await poll(is_so)
    return of(lines, event)


async def test_a_request_that_finishes(service, store, scrape):
    await service.put(JOY)
    await service.register(spec("waits", CAPTURE))
    await service.events(ask(spec("r", CAPTURE, [ADD_JOY]), num_sequences=2))
    await store.seal()
    await until(scrape, ("residuum_inference_open_captures", store.endpoint), 0)
    found = await scrape()
    expected = {
        ("residuum_inference_store_up", store.endpoint): 1,
        ("residuum_inference_requests_total", "finished"): 1,
        ("residuum_inference_requests_total", "failed"): 0,
        ("residuum_inference_running_requests",): 0,
        ("residuum_inference_registrations",): 1,
        ("residuum_inference_kept_vectors",): 1,
        ("residuum_inference_active_vectors",): 0,
        ("residuum_inference_active_vectors_limit",): 1024,
        ("residuum_inference_unheard_seals", store.endpoint): 0,
        ("residuum_inference_prompt_tokens_total",): 3,
        ("residuum_inference_generated_tokens_total",): 6,
        ("residuum_inference_first_token_seconds_count",): 1,
        ("residuum_inference_request_seconds_count",): 1,
        ("residuum_call_seconds_count", "Generate"): 1,
        ("residuum_call_seconds_count", "PutVectors"): 1,
    }
    assert some(found, expected) == expected
    errors = {name[1:]: value for name, value in found.items() if name[0] == "residuum_call_errors_total"}
    assert errors == dict.fromkeys(product(FAULTY, ["INTERNAL"]), 0), "an alert misses what is not there before"
    seconds = found["residuum_inference_first_token_seconds_sum",]
    assert 0 < seconds <= found["residuum_inference_request_seconds_sum",] < DEADLINE
    assert ("process_cpu_seconds_total",) in found


async def test_a_request_that_runs_and_is_aborted(service, store, scrape):
    service.engine.script = stuck_after(Delta(text="t", token_ids=[1]))
    await service.put(JOY)
    store.failing_seals = 1
    call = service.stub.Generate(ask(spec("r", CAPTURE, [ADD_JOY])))
    assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
    running = {
        ("residuum_inference_running_requests",): 1,
        ("residuum_inference_active_vectors",): 1,
        ("residuum_inference_open_captures", store.endpoint): 1,
        ("residuum_inference_generated_tokens_total",): 1,
        ("residuum_inference_first_token_seconds_count",): 1,
    }
    assert some(await scrape(), running) == running
    await service.abort("r")
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await until(scrape, ("residuum_inference_open_captures", store.endpoint), 0)
    ended = {
        ("residuum_inference_requests_total", "aborted"): 1,
        ("residuum_inference_request_seconds_count",): 0,
        ("residuum_inference_running_requests",): 0,
        ("residuum_inference_active_vectors",): 0,
        ("residuum_call_errors_total", "Generate", "ABORTED"): 1,
    }
    assert some(await scrape(), ended) == ended


async def test_a_client_that_goes(service, scrape):
    service.engine.script = stuck_after(Delta(text="t", token_ids=[1]))
    call = service.stub.Generate(ask(spec("r")))
    await call.read()
    call.cancel()
    await until(scrape, ("residuum_inference_requests_total", "cancelled"), 1)
    await until(scrape, ("residuum_call_errors_total", "Generate", "CANCELLED"), 1)


async def test_a_capture_that_cannot_be_opened_is_not_open(service, store, scrape):
    store.refuse = Reason.ERROR_REASON_STORE_FULL
    await failure_of(service.events(ask(spec("r", CAPTURE))))
    expected = {
        ("residuum_inference_open_captures", store.endpoint): 0,
        ("residuum_inference_requests_total", "refused"): 1,
        ("residuum_call_errors_total", "Generate", "STORE_FULL"): 1,
    }
    assert some(await scrape(), expected) == expected


async def test_a_request_is_refused_if_its_capture_is_after_generation_began(service, store, scrape):
    store.takes_early_rows = True
    await service.events(ask(spec("r", CAPTURE)))
    service.engine.script = stuck_after()
    store.refuse = Reason.ERROR_REASON_CAPTURE_EXISTS
    failure = await failure_of(service.events(ask(spec("s", CAPTURE))))
    assert failure.reason == Reason.ERROR_REASON_CAPTURE_EXISTS
    assert len(service.engine.calls) == len(service.engine.closed) == 2, "it did not wait for the store, and stopped"
    await until(scrape, ("residuum_inference_open_captures", store.endpoint), 0)  # the seal of r is on its way
    expected = {
        ("residuum_inference_running_requests",): 0,
        ("residuum_inference_requests_total", "finished"): 1,
        ("residuum_inference_requests_total", "refused"): 1,
        ("residuum_inference_requests_total", "failed"): 0,
    }
    assert some(await scrape(), expected) == expected
    assert [seal.capture_id for seal in store.seals] == ["r"]


async def test_errors_by_reason(service, scrape):
    for _ in range(2):
        await failure_of(service.abort("nobody"))
    await failure_of(service.events(ask("nobody")))
    expected = {
        ("residuum_call_errors_total", "Abort", "UNKNOWN_REQUEST"): 2,
        ("residuum_call_errors_total", "Generate", "UNKNOWN_REQUEST"): 1,
        ("residuum_call_seconds_count", "Abort"): 2,
        ("residuum_inference_requests_total", "refused"): 1,
    }
    assert some(await scrape(), expected) == expected


async def test_names_follow_prometheus(service, scrape):
    await service.events(ask())
    own = {name for name, *_ in await scrape() if name.startswith("residuum_")}
    kinds = ("_total", "_bytes", "_seconds_bucket", "_seconds_count", "_seconds_sum", "_created")
    assert {name.removeprefix("residuum_inference_") for name in own if not name.endswith(kinds)} == {
        *("running_requests", "registrations", "kept_vectors", "active_vectors", "active_vectors_limit"),
        *("waiting_for_vectors", "open_captures", "unheard_seals"),
    }


async def test_admins_see_the_load_with_the_model(service, store):
    service.engine.script = stuck_after(Delta(text="t", token_ids=[1]))
    call = service.stub.Generate(ask(spec("r", CAPTURE)))
    assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
    info = await service.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert info.load == inference_pb2.ServiceLoad(
        running_requests=1, open_captures=1, prompt_tokens=3, generated_tokens=1
    )
    set_caller(Caller("lab", frozenset({Right.READ})))
    info = await service.servicer.GetModelInfo(inference_pb2.GetModelInfoRequest(), None)
    assert not info.HasField("load")  # it would tell about other tenants
    await service.abort("r")


def test_workers_and_shippers(tmp_path):
    """One worker has written figures and one has not; one shipper runs and one is being restarted."""
    controls = [str(tmp_path / f"rank{rank}.sock") for rank in (0, 2)]
    ring = {
        "ring_bytes": 100,
        "bytes_used": 60,
        "store_bytes_used:a": 20,
        "store_bytes_used:h:1": 40,
        "under_way": 3,
        "published": 8,
        "seconds_waited": 1.5,
    }
    figures_path(controls[0]).write_text(json.dumps(ring))
    shippers = SimpleNamespace(
        status=lambda: [
            ShipperStatus(7, 0, {"acked_bytes:a": 50, "ack_lag_seconds:a": 0.5, "unacked_bytes:h:1": 9}),
            ShipperStatus(None, 2, {}),
        ]
    )
    registry = make_registry()
    registry.register(ShippingCollector(controls, shippers))
    assert service_load(registry) == inference_pb2.ServiceLoad(
        ring_used_bytes=60, ring_wait_seconds=1.5, acknowledged_bytes=50
    )
    listener = MetricsListener("127.0.0.1:0", registry)
    found = samples(listener.port)
    listener.close()
    expected = {
        ("residuum_inference_ring_bytes", "0"): 100,
        ("residuum_inference_ring_used_bytes", "0"): 60,
        ("residuum_inference_ring_extents", "0"): 3,
        ("residuum_inference_ring_extents_published_total", "0"): 8,
        ("residuum_inference_ring_wait_seconds_total", "0"): 1.5,
        ("residuum_inference_ring_store_used_bytes", "a", "0"): 20,
        ("residuum_inference_ring_store_used_bytes", "h:1", "0"): 40,
        ("residuum_inference_shipper_acked_bytes_total", "0", "a"): 50,
        ("residuum_inference_shipper_ack_lag_seconds", "0", "a"): 0.5,
        ("residuum_inference_shipper_unacked_bytes", "0", "h:1"): 9,
        ("residuum_inference_shipper_up", "0"): 1,
        ("residuum_inference_shipper_up", "1"): 0,
        ("residuum_inference_shipper_restarts_total", "1"): 2,
    }
    assert some(found, expected) == expected
    assert ("residuum_inference_ring_bytes", "1") not in found
    assert ("residuum_inference_shipper_acked_bytes_total", "1", "a") not in found
    assert ("residuum_inference_shipper_acked_bytes_total", "0", "h:1") not in found


def test_an_address_in_use_is_reported():
    first = MetricsListener("127.0.0.1:0", make_registry())
    with pytest.raises(OSError, match=f"metrics: cannot listen on 127.0.0.1:{first.port}"):
        MetricsListener(f"127.0.0.1:{first.port}", make_registry())
    first.close()


# ------------------------------------------------------------------------------------------------------------- the log


@pytest.fixture
def lines():
    with capture_logs([merge_contextvars]) as found:
        yield found


def of(lines, event):
    return [line for line in lines if line["event"] == event]


async def test_each_request_ends_with_a_line_that_has_its_id(service, lines):
    await asyncio.gather(*(service.events(ask(spec(name))) for name in "abc"))
    service.engine.script = stuck_after(Delta(text="t", token_ids=[1]))
    call = service.stub.Generate(ask(spec("gone")))
    await call.read()
    call.cancel()
    ended = {line["request_id"]: line for line in await logged(lines, "request ended", 4)}
    assert sorted(ended) == ["a", "b", "c", "gone"]
    assert ended["gone"]["outcome"] == "cancelled"
    line = ended["b"]
    assert (line["outcome"], line["prompt_tokens"], line["generated_tokens"]) == ("finished", 3, 3)
    assert 0 < line["first_token_seconds"] <= line["seconds"] < DEADLINE
    assert "reason" not in line


async def test_a_fault_is_logged_with_its_request(service, lines):
    async def failing(call):
        yield Delta(text="t", token_ids=[1])
        raise ZeroDivisionError

    service.engine.script = failing
    assert (await failure_of(service.events(ask(spec("r"))))).reason == Reason.ERROR_REASON_INTERNAL
    (fault,) = of(lines, "call failed")
    (ended,) = of(lines, "request ended")
    assert (fault["request_id"], ended["request_id"]) == ("r", "r")
    assert (ended["outcome"], ended["reason"]) == ("failed", "INTERNAL")


@pytest.mark.parametrize("method", ["register", "abort", "update"])
async def test_the_other_calls_about_a_request_bind_it_too(service, lines, monkeypatch, method):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(service.registry, {"update": "get_running"}.get(method, method), fail)
    await failure_of(service.register(spec("r")) if method == "register" else getattr(service, method)("r"))
    (fault,) = of(lines, "call failed")
    assert fault["request_id"] == "r"


async def test_log_lines_have_no_request_id_of_another_call(service, lines, monkeypatch):
    await service.events(ask(spec("r")))

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(service.cache, "missing", fail)
    await failure_of(service.stub.FindMissingVectors(inference_pb2.FindMissingVectorsRequest()))
    (fault,) = of(lines, "call failed")
    assert "request_id" not in fault
    assert get_contextvars() == {}


async def test_a_seal_that_fails_later_is_logged_with_its_request(service, store, lines):
    store.refuse_seal = Reason.ERROR_REASON_UNKNOWN_CAPTURE
    await service.events(ask(spec("r", CAPTURE)))
    (line,) = await logged(lines, "capture not sealed")
    assert line["request_id"] == "r"
