"""A request is one trace across client, inference service and store processes. Without tracing there is no trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.support import ENVIRONMENT, Store
from tests.tracing.collector import Collector, Span


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def service(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Both services, traced; the endpoint of the inference service."""
    flags = ("--seal-timeout-seconds", "0.1", "--otel-endpoint", collector.endpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "OTEL_BSP_SCHEDULE_DELAY", "50")
        store = Store(tmp_path_factory.mktemp("tracing"), *flags)
    command = [sys.executable, "-m", "tests.tracing.inference_service", store.endpoint]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=traced_to(collector), text=True, **pipes)
    yield process.stdout.readline().strip()
    process.communicate(timeout=60)
    store.close()


PROGRAM = """
import sys
import residuum
from residuum.rpc.tracing import start_tracing
stop = start_tracing("residuum-client")  # as a program sets its own tracer provider
with residuum.Client(sys.argv[1]) as client:
    client.generate("abc", max_tokens=3, capture=residuum.Capture(layers="all"))
stop()
"""


def generate(endpoint: str, environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, endpoint], env=environment, check=True, timeout=120)


def traced_to(collector: Collector) -> dict[str, str]:
    return {**ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}


def find(spans: list[Span], service: str, name: str) -> Span | None:
    return next((span for span in spans if (span.service, span.name) == (service, name)), None)


GENERATE = "residuum.v1.InferenceService/Generate"
SEAL, OPEN = "residuum.v1.StoreService/SealCaptures", "residuum.v1.StoreService/OpenCaptures"


@pytest.mark.slow
def test_one_request_is_one_trace_across_three_processes(collector: Collector, service: str) -> None:
    generate(service, traced_to(collector))
    collector.wait_for(lambda spans: find(spans, "residuum-store", "capture") and find(spans, "residuum-store", SEAL))
    whole = collector.wait_for(lambda spans: find(spans, "residuum-client", "client.generate"))
    collector.wait_for(lambda spans: find(spans, "residuum-inference", GENERATE))
    chain = [
        ("residuum-client", GENERATE),
        ("residuum-inference", GENERATE),
        ("residuum-inference", OPEN),
        ("residuum-store", OPEN),
        ("residuum-store", "capture"),
    ]
    parent = whole
    for at in chain:
        span = collector.wait_for(lambda spans, at=at: find(spans, *at))
        assert (span.trace, span.parent) == (whole.trace, parent.id), at
        parent = span
    served = find(collector.spans, *chain[1])
    assert served.events == ["checked", "queued", "first token", "generated"]
    for name in ("residuum-inference", "residuum-store"):
        assert find(collector.spans, name, SEAL).trace == whole.trace
    capture = find(collector.spans, "residuum-store", "capture")
    assert capture.attributes["residuum.state"] == "INCOMPLETE"  # this engine captures no rows
    names = {span.attributes["residuum.request_id"] for span in (whole, served, capture)}
    assert len(names) == 1


@pytest.mark.slow
def test_a_failed_call_is_an_error_in_the_trace(collector: Collector, service: str) -> None:
    collector.clear()
    command = [sys.executable, "-m", "residuum", "generate", "--endpoint", service, "abc", "--max-tokens", "3000"]
    done = subprocess.run(command, env=traced_to(collector), check=False, timeout=120, capture_output=True)
    assert done.returncode == 1
    for name in ("residuum-client", "residuum-inference"):
        span = collector.wait_for(lambda spans, name=name: find(spans, name, GENERATE))
        assert span.attributes["rpc.grpc.status_code"] == 3  # INVALID_ARGUMENT


@pytest.mark.parametrize(
    "program", ["import residuum; residuum.Client('127.0.0.1:1').close()", "import store_svc.server"]
)
def test_opentelemetry_is_not_imported_without_tracing(program: str) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("OTEL_")}
    check = f"{program}; import sys; print(*[name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", check], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_an_invalid_endpoint_url_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "store_svc", "--path", str(tmp_path / "db"), "--otel-endpoint", "localhost:4317"]
    done = subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert "http://" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "1"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x"),
    ],
)
def test_a_bad_variable_of_opentelemetry_is_one_line(variable: str, value: str) -> None:
    environment = {**ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", variable: value}
    command = [sys.executable, "-m", "residuum", "token", "--tenant", "a", "--rights", "read"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    *_, told = done.stderr.splitlines()
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (1, "", False)
    assert told.startswith("residuum: traces cannot be sent: ")
    assert told.endswith(". Check the environment variables that begin with OTEL_.")
