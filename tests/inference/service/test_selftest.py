"""The startup self-test, on an engine whose taps work, and on engines whose taps have one defect each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from inference_svc import selftest
from inference_svc.engine.streams import Delta
from inference_svc.selftest import SelfTestError, run_self_test, self_test_replicas
from inference_svc.taps.plan import Kind
from residuum.v1 import capture_pb2
from tests.inference.service_support import FACTS
from tests.inference.taps_support import steer

LAYERS, HIDDEN, POSITIONS, PROMPT = 4, 32, 8, 5
POST, MLP_OUT, Q = capture_pb2.SITE_RESID_POST, capture_pb2.SITE_MLP_OUT, capture_pb2.SITE_Q
TOKENS = [7, 9, 8, 6]
STEERED = 1
"""The layer that the self-test steers: the middle one."""


def rows_of(push):
    """Rows of a model in which each layer adds something, float32 [layers, positions, hidden]."""
    added = np.random.default_rng(0).standard_normal((LAYERS, POSITIONS, HIDDEN)).astype(np.float32)
    rows = added.cumsum(axis=0)
    if push is not None:
        rows[STEERED:] += push
    return rows


class ProbedEngine:
    """An engine with a model of four layers. `fault` takes its rows and whether they are steered, and damages them."""

    facts = dataclasses.replace(FACTS, num_layers=LAYERS, hidden_size=HIDDEN)

    def __init__(self, fault=None):
        self.fault = fault
        self.bank = {}
        self.probes = {}
        self.salts = []
        self.is_listening = False
        self.token_gap = 0.0
        self.prompt_error = np.zeros((LAYERS, POSITIONS - PROMPT, HIDDEN), np.float32)

    def operations_seen(self, plan):
        return plan.operations

    def steered(self, row, operations):
        for operation in operations:
            row = steer(row, operation, self.bank)
        return row

    async def load_vectors(self, rows):
        self.bank.update({row: np.frombuffer(values, "<f4") for row, values in rows})

    async def generate(self, engine_id, prompt, sampling, plan, cache_salt):
        assert plan.capture.is_probe
        assert plan.capture.layers == tuple(range(LAYERS))
        self.salts.append(cache_salt)
        push = None
        for operation in plan.operations:
            assert (operation.kind, operation.layers) == (Kind.ADD, (STEERED,))
            push = self.bank[operation.row]
        rows = rows_of(None)
        if self.operations_seen(plan):
            steered = [self.steered(row, self.operations_seen(plan)) for row in rows[STEERED]]
            rows[STEERED:] += np.stack(steered) - rows[STEERED]
        if self.fault:
            rows = self.fault(rows, push)
        if len(prompt) > PROMPT:
            assert prompt[PROMPT:] == TOKENS[:-1]
            rows[:, PROMPT:] += self.prompt_error
        self.probes[plan.capture.capture_id] = rows
        for token in TOKENS[len(prompt) - PROMPT :]:
            yield Delta("", [token])

    async def listen_to_logits(self):
        self.is_listening = True

    async def explain_logits(self, rows, tokens):
        """Answer like three ranks: one sees the request's row, one another request's, and one computes no logits."""
        assert self.is_listening
        assert tokens == TOKENS
        given = np.frombuffer(rows, "<f4").reshape(len(tokens), HIDDEN)
        error = float(np.linalg.norm(given - rows_of(None)[-1, PROMPT - 1 :]) / np.linalg.norm(given))
        return [(1.0, 0.5), (error, self.token_gap)]

    async def take_probe(self, capture_id):
        """Deliver two blocks as a worker does: one for the prompt, one for generated rows."""
        rows = self.probes.pop(capture_id)
        return [
            (
                [(POST, layer) for layer in layers],
                list(positions),
                np.ascontiguousarray(rows[layers][:, positions]).tobytes(),
            )
            for layers in (range(2), range(2, LAYERS))
            for positions in (range(PROMPT), range(PROMPT, POSITIONS))
        ]


async def test_taps_that_work_pass():
    engine = ProbedEngine()
    await run_self_test(engine)
    assert len(set(engine.salts)) == 4  # otherwise a request would read another one's prefix cache
    assert not engine.probes


@pytest.mark.parametrize(
    ("change", "told"),
    [(lambda rows: rows[::-1], "Two ranks .* capture different rows of one prompt: at SITE_RESID_POST"),
     (np.zeros_like, "zero")],
)  # fmt: skip
async def test_each_rank_that_shares_the_layers_is_tested(change, told):
    class Engine(ProbedEngine):
        async def take_probe(self, capture_id):
            if capture_id == "self-test-rank1":
                self.probes[capture_id] = change(self.probes[capture_id])
            return await super().take_probe(capture_id)

    with pytest.raises(SelfTestError, match=told):
        await run_self_test(Engine())


class UngatedEngine(ProbedEngine):
    """An engine that ignores gates."""

    def operations_seen(self, plan):
        return [dataclasses.replace(operation, gate=None) for operation in plan.operations]


class ClosedEngine(ProbedEngine):
    """An engine whose gates never open."""

    def operations_seen(self, plan):
        return [operation for operation in plan.operations if operation.gate is None]


class InvertedEngine(ProbedEngine):
    """An engine whose gates open on the wrong side of the threshold."""

    def operations_seen(self, plan):
        return [
            dataclasses.replace(operation, gate=gate and gate._replace(sharpness=-gate.sharpness))
            for operation, gate in ((operation, operation.gate) for operation in plan.operations)
        ]


@pytest.mark.parametrize("engine", [UngatedEngine, ClosedEngine, InvertedEngine])
async def test_gates_that_do_not_work_are_found(engine):
    with pytest.raises(SelfTestError, match=r"wrong amount: they are off by [12]00"):
        await run_self_test(engine())


class ShortPartsEngine(ProbedEngine):
    """An engine whose MLPs add far less than bfloat16 can show next to the stream, as with weights that are tiny."""

    facts = dataclasses.replace(ProbedEngine.facts, sites=(POST, MLP_OUT), steering_sites=(POST, MLP_OUT))

    async def generate(self, engine_id, prompt, sampling, plan, cache_salt):
        async for delta in super().generate(engine_id, prompt, sampling, plan, cache_salt):
            yield delta
        operations = plan.operations
        push = self.bank[operations[0].row] if operations else np.zeros(HIDDEN, np.float32)
        rows = rows_of(None)
        parts = rows * np.float32(1e-6)
        if operations and operations[0].site == MLP_OUT:
            parts[STEERED] += push
        rows[STEERED:] += push
        self.probes[plan.capture.capture_id] = (in_bfloat16(rows), parts)

    async def take_probe(self, capture_id):
        units = [(site, layer) for site in (POST, MLP_OUT) for layer in range(LAYERS)]
        return [(units, list(range(POSITIONS)), np.concatenate(self.probes.pop(capture_id)).tobytes())]


def in_bfloat16(rows):
    return (rows.view(np.uint32) + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32)


async def test_steering_is_seen_next_to_a_stream_that_is_far_longer():
    await run_self_test(ShortPartsEngine())


class HybridEngine(ProbedEngine):
    """An engine whose model has queries in some layers only."""

    facts = dataclasses.replace(ProbedEngine.facts, sites=(POST, Q), site_layers=((0, 1, 2, 3), (1, 3)))

    async def take_probe(self, capture_id):
        rows = self.probes.pop(capture_id, None)
        if rows is None:
            return []
        units = [*((POST, layer) for layer in range(LAYERS)), (Q, 1), (Q, 3)]
        values = np.concatenate([rows, 2 * rows[[1, 3]]])
        return [(units[:-1], list(range(POSITIONS)), values[:-1].tobytes())] + [
            ([unit], list(range(POSITIONS)), values[-1:].tobytes()) for unit in units[-1:] if self.sends_all
        ]

    sends_all = True


async def test_layers_without_a_site_are_not_waited_for():
    await run_self_test(HybridEngine())


async def test_rows_of_a_site_in_some_layers_that_do_not_arrive_are_found(monkeypatch):
    monkeypatch.setattr(selftest, "_ROWS_SECONDS", 0.05)
    engine = HybridEngine()
    engine.sends_all = False
    with pytest.raises(SelfTestError, match=r"SITE_Q: rows of layers \[3\] did not arrive"):
        await run_self_test(engine)


def at(layer, value):
    def spoil(rows, push):
        rows[layer] = value
        return rows

    return spoil


def repeat_a_layer(rows, push):
    rows[1] = rows[0]
    return rows


def steer_nothing(rows, push):
    return rows_of(None)


def steer_too_early(rows, push):
    if push is not None:
        rows[STEERED - 1] += push
    return rows


def steer_half(rows, push):
    return rows if push is None else rows_of(push / 2)


def miss_a_part(rows, push):
    rows[-1] += 0.3 * rows[0]
    return rows


def keep_the_steering_to_itself(rows, push):
    if push is not None:
        rows[STEERED + 1 :] -= push
    return rows


FAULTS = {
    "a layer's rows are not numbers": (at(3, np.nan), r"layers \[3\] did not arrive"),
    "a layer's rows are infinite": (at(1, np.inf), "captured rows hold infinity"),
    "a layer's rows are zero": (at(0, 0.0), r"layers \[0\] are all zero"),
    "two layers have the same rows": (repeat_a_layer, r"layers \[1\] equal those of the layer before"),
    "the last layer's rows are not what the logits came from": (miss_a_part, "does not explain the model's own logits"),
    "nothing is steered": (steer_nothing, "wrong amount: they are off by 100"),
    "steering begins a layer too early": (steer_too_early, "moved rows of earlier layers"),
    "steering is too weak": (steer_half, "wrong amount: they are off by 50"),
    "steering does not reach the next layers": (keep_the_steering_to_itself, "did not move the rows of later layers"),
}


@pytest.mark.parametrize(("fault", "told"), FAULTS.values(), ids=FAULTS)
async def test_taps_that_are_broken_are_found(fault, told):
    with pytest.raises(SelfTestError, match=told):
        await run_self_test(ProbedEngine(fault))


class Replicated:
    """An engine with two replicas."""

    def __init__(self, *replicas):
        self.replicas = lambda: list(replicas)


async def test_every_replica_is_tested():
    first, second = ProbedEngine(), ProbedEngine()
    await self_test_replicas(Replicated(first, second))
    assert len(first.salts) == len(second.salts) == 4
    with pytest.raises(SelfTestError, match=r"^Replica 1: SITE_RESID_POST: captured rows of layers \[0\] are all zero"):
        await self_test_replicas(Replicated(ProbedEngine(), ProbedEngine(at(0, 0.0))))
    with pytest.raises(SelfTestError, match=r"^SITE_RESID_POST: captured rows"):
        await self_test_replicas(Replicated(ProbedEngine(at(0, 0.0))))


async def test_a_token_that_the_rows_do_not_give_is_found():
    engine = ProbedEngine()
    engine.token_gap = 0.2
    with pytest.raises(SelfTestError, match=r"the served token's logit is 20\.0% of their range below the largest"):
        await run_self_test(engine)


async def test_generated_rows_that_are_not_those_of_a_prompt_are_found():
    engine = ProbedEngine()
    engine.prompt_error[1:] = 2.0  # in three of four layers
    with pytest.raises(SelfTestError, match=r"differ by \d+% or more.*PIECEWISE"):
        await run_self_test(engine)


async def test_rows_of_the_prompt_that_do_not_arrive_are_not_taken_for_other_values():
    engine = ProbedEngine()
    engine.prompt_error[:] = np.nan
    with pytest.raises(SelfTestError, match="did not arrive"):
        await run_self_test(engine)


async def test_another_expert_at_some_positions_or_in_some_layers_passes():
    engine = ProbedEngine()
    engine.prompt_error[:, :-1] = 2.0
    engine.prompt_error[-1] = 2.0
    await run_self_test(engine)


async def test_rows_that_arrive_in_a_later_step_are_waited_for():
    engine = ProbedEngine()
    late = []

    async def take_in_two_steps(capture_id):
        if not late:
            late.extend(await ProbedEngine.take_probe(engine, capture_id))
            return late[::2]  # the prompt's
        blocks = late[1::2]
        late.clear()
        return blocks

    engine.take_probe = take_in_two_steps
    await run_self_test(engine)


async def test_rows_that_do_not_arrive_are_found(monkeypatch):
    engine = ProbedEngine()
    monkeypatch.setattr(selftest, "_ROWS_SECONDS", 0.05)
    taken = []

    async def take_half(capture_id):
        if not taken:
            taken.extend((await ProbedEngine.take_probe(engine, capture_id))[:2])
            return taken
        return []

    engine.take_probe = take_half
    with pytest.raises(SelfTestError, match=r"layers \[2, 3\] did not arrive"):
        await run_self_test(engine)
