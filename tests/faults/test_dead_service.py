"""An inference service is killed during a reply: the error for its caller, and the end of the capture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import residuum
from svc_common.launcher import ROOT
from tests import warm_start
from tests.faults.support import Store
from tests.waiting import wait_for

NO_ROWS = residuum.Capture(layers="all", positions=residuum.Positions.of([(1000, None)]))
"""A capture that is complete as soon as it is sealed: the scripted engine sends no rows."""
STUCK, PROMPT = [1, 5, 6], [5, 6, 7]
LEASE, DRAIN = 4.0, 0.5


class ScriptedService:
    """A process of the inference service, a fork of one that has imported vLLM."""

    def __init__(self, store: str, log: Path) -> None:
        log.touch()
        self.process = warm_start.launch("tests.faults.scripted_service", [store], ROOT, log)

        def address() -> str | None:
            assert self.process.poll() is None, f"the service did not start: {log.read_text()}"
            return next((line for line in log.read_text().splitlines() if line.startswith("127.0.0.1:")), None)

        self.endpoint = wait_for(address, lambda: f"the service prints its address\n{log.read_text()}", seconds=120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[[str], ScriptedService]]:
    started: list[ScriptedService] = []

    def start(store: str) -> ScriptedService:
        started.append(ScriptedService(store, tmp_path / f"service-{len(started)}.log"))
        return started[-1]

    yield start
    for service in started:
        if service.process.poll() is None:
            service.kill()


def test_a_service_that_is_killed_during_a_reply(
    start_store: Callable[..., Store], start_service: Callable[[str], ScriptedService]
) -> None:
    store = start_store("--lease-seconds", str(LEASE), "--ending-timeout-seconds", str(DRAIN))
    first, second = start_service(store.endpoint), start_service(store.endpoint)
    with (
        residuum.Client(first.endpoint, store=store.endpoint) as client,
        residuum.Client(second.endpoint, store=store.endpoint) as other,
    ):
        lives = other.stream(STUCK, capture=NO_ROWS, request_id="lives", max_tokens=9)
        stream = client.stream(STUCK, capture=NO_ROWS, request_id="job", max_tokens=9)
        with lives, stream:
            assert next(stream).text == "x"
            first.kill()
            killed = time.monotonic()
            with pytest.raises(residuum.Unreachable) as caught:
                next(stream)
            assert "went away during the reply" in str(caught.value)
            assert "TLS" not in str(caught.value)
            assert caught.value.request_id == "job"
            with pytest.raises(residuum.Unreachable) as again:
                client.generate(PROMPT)
            assert "has answered before, but does not answer now" in str(again.value)
            assert "TLS" not in str(again.value)

            with pytest.raises(residuum.CaptureExists, match="still running"):
                other.generate(PROMPT, capture=NO_ROWS, request_id="job", if_exists="replace")
            manifest = other.manifest("job", wait=30)
            assert (manifest.state, manifest.reason) == ("incomplete", "SERVICE_GONE")
            assert time.monotonic() - killed < LEASE + DRAIN + 10
            assert other.manifest("lives").state == "open"
        reply = other.generate(PROMPT, capture=NO_ROWS, request_id="job", if_exists="replace")
        assert reply.token_ids == (1, 2, 3)
        assert other.manifest("job", wait=30).is_complete
        assert other.manifest("lives", wait=30).state == "aborted"
