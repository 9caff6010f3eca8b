"""Requests that vLLM preempts during their reply, and then computes again from their first position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.engines import KV_BLOCK, KV_BLOCKS
from tests.conformance.rows import ALL, SITES, check_capture, everything, make_prompt
from tests.conformance.steering import adding

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

MAX_SHORTFALL = 1e-2


def test_rows_of_preempted_requests(engine: Engine, reference: Reference, direction: residuum.Vector) -> None:
    """Fourteen long replies at once, nearly twice what the KV cache holds, each with a different capture spec."""
    rng = np.random.default_rng(11)
    kinds = [
        (ALL, everything),
        (residuum.Capture(sites=SITES, positions="generated"), range),
        (residuum.Capture(sites=SITES, positions=residuum.Positions(every=5)), lambda _, rows: range(0, rows, 5)),
        (None, everything),
    ]
    width = engine.client.info().hidden_size
    probe = residuum.Probe.from_attention(rng.normal(size=(2, width)) / 9, rng.normal(size=(2, width)), layer=2)
    asked = []
    with engine.held(direction, *probe.vectors):
        for index in range(14):
            capture, wanted = kinds[index % len(kinds)]
            prompt = make_prompt(rng, int(rng.integers(20, 100)))
            steered = adding(direction, scale=0.7, positions="generated", start=len(prompt)) if index % 3 == 0 else None
            stream = engine.client.stream(
                prompt,
                max_tokens=int(rng.integers(180, 230)),
                ignore_eos=True,
                temperature=float(index % 2 and capture is not None),
                seed=index,
                capture=capture,
                probes=probe,
                steer=steered.steer if steered else (),
            )
            asked.append((stream, wanted, steered.changes if steered else {}))
    for stream, _, _ in asked:
        for _ in stream:
            pass
    replies = [stream.reply for stream, _, _ in asked]
    assert sum(reply.usage.prompt_tokens + reply.usage.generated_tokens for reply in replies) > KV_BLOCK * KV_BLOCKS
    preempted = [reply for reply in replies if engine.journal.preemptions(reply.request_id)]
    assert sum(reply.captured for reply in preempted) >= 2, "vLLM preempted captured requests"
    for reply in preempted:
        firsts = [first for first, _ in engine.journal.chunks(reply.request_id)]
        assert firsts != sorted(firsts), "it was computed again from an earlier position"
    for reply, (_, wanted, changes) in zip(replies, asked, strict=True):
        if reply.captured:
            check_capture(engine, reference, reply, wanted=wanted, changes=changes)
        else:
            assert reference.shortfall(reply.prompt_token_ids, reply.token_ids, changes) < MAX_SHORTFALL
        rows = reference.rows([*reply.prompt_token_ids, *reply.token_ids[:-1]], changes)["resid_post"][2]
        expected = pooled(rows.astype(np.float64), probe)[len(reply.prompt_token_ids) - 1 :]
        np.testing.assert_allclose(reply.scores["probe"], expected, rtol=0, atol=2e-3 * max(np.abs(expected).max(), 1))


def pooled(rows: np.ndarray, probe: residuum.Probe) -> np.ndarray:
    """Return the scores of an attention probe with two heads, without overflow for these rows."""
    weights = np.exp(rows @ probe.weights[:2].T)
    return (np.cumsum(weights * (rows @ probe.weights[2:].T), axis=0) / np.cumsum(weights, axis=0)).sum(axis=1)
