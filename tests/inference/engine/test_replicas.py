"""An engine with several replicas: every call reaches each of them, and the answers are joined as they should be."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.engine import engine as engine_module
from inference_svc.engine.engine import Engine
from inference_svc.engine.ranks import RankFailedError, UntappedLayersError, check_replicas
from inference_svc.engine.replicas import Replicas
from inference_svc.taps.errors import UnsupportedEngineError
from inference_svc.taps.vllm.missing_names import IncompatibleEngineError
from residuum.rpc.errors import Failure
from tests.inference.engine.test_engine import rank
from tests.inference.service_support import FACTS

FIRST, SECOND = b"\x00\x00", b"\x01\x00"
"""How vLLM's client names the replicas."""


class Client:
    """The part of vLLM's client of several replicas that the calls use. It has a scripted answer for each replica."""

    def __init__(self, **answers):
        self.core_engines = [FIRST, SECOND]
        self.answers = answers
        self.asked = []

    async def _call_utility_async(self, utility, method, timeout, arguments, options, *, engine):
        assert (utility, timeout, options) == ("collective_rpc", None, None)
        self.asked.append((engine, method, arguments))
        answer = self.answers[method][self.core_engines.index(engine)]
        if isinstance(answer, Exception):
            raise answer
        return answer


def engine_of(client):
    llm = SimpleNamespace(engine_core=client, errored=False)
    return Engine(llm, None, dataclasses.replace(FACTS, data_parallel_size=2))


async def test_a_call_reaches_every_replica_and_returns_all_answers():
    client = Client(residuum_take_probe=[[["a"], []], [[], ["b"]]])
    assert await engine_of(client).take_probe("self-test") == ["a", "b"]
    assert client.asked == [(name, "residuum_take_probe", ("self-test",)) for name in (FIRST, SECOND)]


async def test_one_replica_can_be_called_by_itself():
    client = Client(residuum_take_probe=[[["a"]], [["b"]]])
    answers = [await replica.take_probe("self-test") for replica in engine_of(client).replicas()]
    assert answers == [["a"], ["b"]]
    assert [name for name, *_ in client.asked] == [FIRST, SECOND]


async def test_the_signs_of_a_projection_are_ready_once_every_replica_has_them():
    client = Client(residuum_keep_signs=[[[True, True]], [[True, False]]])
    assert await engine_of(client).keep_signs([(1, 2, False), (3, 4, False)]) == [True, False]


@pytest.mark.parametrize(
    ("first", "second", "position"),
    [(0, 7, 7), (7, 0, 7), (0, 0, 0), (None, 0, None), (0, None, None)],
    ids=["second runs it", "first runs it", "on its way", "ended in the first", "ended in the second"],
)
async def test_a_change_applies_where_the_replica_with_the_request_says(first, second, position):
    client = Client(residuum_change_steering=[[{"r": first}] * 2, [{"r": second}] * 2])
    assert await engine_of(client).change_steering({"r": ()}) == {"r": position}


async def test_ranks_of_a_replica_that_disagree_are_found():
    client = Client(residuum_change_steering=[[{"r": 0}] * 2, [{"r": 7}, {"r": 8}]])
    with pytest.raises(RuntimeError, match="at different positions"):
        await engine_of(client).change_steering({"r": ()})


async def test_a_call_that_fails_names_the_replica():
    client = Client(residuum_forget=[[None, None], [None, "ValueError: no"]])
    with pytest.raises(RankFailedError, match=r"failed in 1 of 4 workers \(replica 1: rank 1: ValueError: no\)"):
        await engine_of(client).forget(["r"])


async def test_a_replica_that_dies_is_a_dead_engine():
    client = Client(residuum_forget=[[None], EngineDeadError()])
    with pytest.raises(Failure) as caught:
        await engine_of(client).forget(["r"])
    assert caught.value.reason_name == "ENGINE_DEAD"


async def test_a_call_ends_if_a_replica_dies_before_it_answers(monkeypatch):
    """vLLM marks the whole engine dead, and never answers."""
    monkeypatch.setattr(engine_module, "_DEATH_POLL_SECONDS", 0.01)
    client = Client()
    engine = engine_of(client)

    async def die(*call, engine):
        if engine == FIRST:
            return [None]
        llm.errored = True
        return await asyncio.Event().wait()

    llm = engine.llm
    client._call_utility_async = die
    with pytest.raises(Failure) as caught:
        await engine.forget(["r"])
    assert caught.value.reason_name == "ENGINE_DEAD"


def test_each_replica_must_capture_the_whole_model(tmp_path):
    here = tmp_path / "here.sock"
    here.touch()
    whole, half = [rank(0, 0, 4, here)], [rank(0, 0, 2, here)]
    check_replicas([whole, whole], 4)
    with pytest.raises(UntappedLayersError, match=r"^replica 1: No rank captures layers 2, 3"):
        check_replicas([whole, half], 4)
    with pytest.raises(UntappedLayersError, match=r"^No rank captures layers 2, 3"):
        check_replicas([half], 4)


def test_a_vllm_without_a_name_is_refused():
    llm = SimpleNamespace(engine_core=SimpleNamespace(core_engines=[FIRST, SECOND]))
    with pytest.raises(IncompatibleEngineError, match="has no _call_utility_async"):
        Replicas(llm, 2).check()
    Replicas(llm, 1).check()  # one replica needs none of the names


def test_replicas_of_another_service_are_refused():
    client = Client()
    Replicas(SimpleNamespace(engine_core=client), 2).check()
    with pytest.raises(UnsupportedEngineError, match="runs 2 of 4 replicas"):
        Replicas(SimpleNamespace(engine_core=client), 4).check()
