"""Two replicas behind one endpoint: requests run on both, and every row is that of transformers.

The last test ends the engine that all tests share.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest

import residuum
from tests.conformance.engines import running_engine
from tests.conformance.rows import ALL, check_capture, make_prompt
from tests.conformance.steering import adding, in_turn, tensor
from tests.conformance.steering import replace as replacing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def replicas(tiny_llama: Path, cache_root: Path) -> Iterator[Engine]:
    """Both services, with an engine of two replicas."""
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    folder = cache_root.parent / "data-parallel"
    folder.mkdir()
    with (
        patch.dict(os.environ, binding),
        running_engine("eager", tiny_llama, folder, cache_root, engine_args={"data_parallel_size": 2}) as running,
    ):
        yield running


def replica_of(engine: Engine, request_id: str) -> int:
    """Return the replica that computed a request of one sequence."""
    (replica,) = {step.replica for step in engine.journal.steps_of(request_id)}
    return replica


def start(engine: Engine, count: int, **options: object) -> list[residuum.Stream]:
    """Start requests of 100 tokens, and wait for a token of each."""
    source = np.random.default_rng(90)
    prompts = [make_prompt(source, 20 + 30 * index) for index in range(count)]
    streams = [
        engine.client.stream(prompt, max_tokens=100, ignore_eos=True, capture=ALL, **options) for prompt in prompts
    ]
    for stream in streams:
        next(stream)
    assert {replica_of(engine, stream.request_id) for stream in streams} == {0, 1}
    return streams


def finish(streams: Sequence[residuum.Stream]) -> None:
    for stream in streams:
        for _ in stream:
            pass


def test_each_replica_captures_and_steers_its_requests(
    replicas: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    steering = adding(direction, scale=0.7)
    plain = start(replicas, 4)
    steered = start(replicas, 4, steer=steering.steer)
    finish([*plain, *steered])
    for stream in plain:
        check_capture(replicas, reference, stream.reply)
    for stream in steered:
        check_capture(replicas, reference, stream.reply, changes=steering.changes)
    serving = replicas.serving()
    assert (serving["replicas"], serving["capturing_ranks"]) == (2, 2)


def test_a_change_of_steering_reaches_the_replica_with_the_request(
    replicas: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    with replicas.paced():
        streams = start(replicas, 4, updatable=True)
        firsts = [stream.update_steering(residuum.Replace(direction, layer=2, value=0.8))[0] for stream in streams]
    finish(streams)
    for stream, first in zip(streams, firsts, strict=True):
        assert len(stream.reply.prompt_token_ids) < first < len(stream.reply.prompt_token_ids) + 99
        changes = {2: in_turn([(first, replacing(tensor(direction), 0.8))])}
        check_capture(replicas, reference, stream.reply, changes=changes)


def test_the_death_of_a_replica_stops_the_service_and_seals_all_captures(replicas: Engine) -> None:
    with replicas.paced(0.2), residuum.Client(replicas.inference.endpoint, store=replicas.store.endpoint) as client:
        streams = start(replicas, 2)
        os.kill(process_of(replicas, "EngineCore_DP1"), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(residuum.Unavailable):
                finish([stream])
        assert replicas.inference.process.wait(60) != 0
        for stream in streams:
            manifest = client.manifest(stream.request_id, wait=True)
            assert (manifest.state, manifest.reason) == ("incomplete", "ENGINE_DIED")
    deadline = time.monotonic() + 30
    while processes_of(replicas):  # the kernel takes a moment to free a killed process's memory
        assert time.monotonic() < deadline, "processes of the service are left"
        time.sleep(0.1)


def processes_of(engine: Engine) -> dict[int, str]:
    """Return the processes of the service by their number, and their titles."""
    table = subprocess.run(["ps", "-eo", "pid=,pgid=,stat=,args="], check=True, capture_output=True, text=True).stdout
    rows = [line.split(maxsplit=3) for line in table.splitlines()]
    group = str(engine.inference.process.pid)
    return {int(pid): title for pid, owner, state, title in rows if owner == group and not state.startswith("Z")}


def process_of(engine: Engine, title: str) -> int:
    (pid,) = [pid for pid, found in processes_of(engine).items() if title in found]
    return pid
