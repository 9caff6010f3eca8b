"""vLLM's prefix cache: a capture lacks no rows because of it, and no request reads values steered by another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.engines import KV_BLOCK
from tests.conformance.rows import ALL, SITES, check_capture, make_prompt
from tests.conformance.steering import adding

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.conformance.rows import Wanted
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

MAX_SHORTFALL = 1e-2
"""How far the logit of a greedy token may be below the largest. Logits of random tokens differ by about 1."""


def read_from_cache(engine: Engine, reply: residuum.Reply) -> int:
    """Return how many prompt positions were not computed for a request."""
    return engine.journal.chunks(reply.request_id)[0][0]


@pytest.mark.parametrize("extra", [0, 1, 8], ids=["aligned", "one token more", "a part of a block more"])
def test_a_warm_cache_leaves_no_row_out(engine: Engine, reference: Reference, extra: int) -> None:
    prompt = make_prompt(np.random.default_rng(30 + extra), 3 * KV_BLOCK + extra)
    cold = engine.client.generate(prompt, max_tokens=3, ignore_eos=True, capture=ALL)
    warm = engine.client.generate(prompt, max_tokens=3, ignore_eos=True)
    assert read_from_cache(engine, warm) >= 2 * KV_BLOCK, "without a capture, the request reads the warm cache"
    again = engine.client.generate(prompt, max_tokens=3, ignore_eos=True, capture=ALL)
    for reply in (cold, again):
        check_capture(engine, reference, reply)
        assert reply.token_ids == warm.token_ids


def test_a_fully_cached_prompt(engine: Engine, reference: Reference) -> None:
    """Three whole blocks, after a longer prompt with the same start."""
    prompt = make_prompt(np.random.default_rng(40), 5 * KV_BLOCK)
    engine.client.generate(prompt, max_tokens=1)
    longer = engine.client.generate(prompt[: 3 * KV_BLOCK + 1], max_tokens=1)
    assert read_from_cache(engine, longer) == 3 * KV_BLOCK, "the cache has three blocks"
    capture = residuum.Capture(sites=SITES, positions="prompt")
    reply = engine.client.generate(prompt[: 3 * KV_BLOCK], max_tokens=2, ignore_eos=True, capture=capture)
    rows = check_capture(engine, reference, reply, wanted=lambda prompt, rows: range(prompt))
    assert {row.position for row in rows} == set(range(3 * KV_BLOCK))


def test_a_partly_cached_block(engine: Engine, reference: Reference) -> None:
    """Two prompts differ from the middle of a block on."""
    rng = np.random.default_rng(41)
    begin = make_prompt(rng, KV_BLOCK + 8)
    engine.client.generate(begin + make_prompt(rng, 40), max_tokens=1)
    other = begin + make_prompt(rng, 40)
    warm = engine.client.generate(other, max_tokens=3, ignore_eos=True)
    assert read_from_cache(engine, warm) == KV_BLOCK
    assert reference.shortfall(other, warm.token_ids) < MAX_SHORTFALL
    check_capture(engine, reference, engine.client.generate(other, max_tokens=3, ignore_eos=True, capture=ALL))


@pytest.mark.parametrize(
    ("positions", "wanted"),
    [
        ("last_prompt", lambda prompt, rows: [prompt - 1]),
        ("generated", range),
        ([(-1, None)], lambda prompt, rows: range(prompt - 1, rows)),
    ],
    ids=["last prompt token", "generated", "both"],
)
def test_a_capture_that_needs_no_cached_row_reads_the_cache(
    engine: Engine, reference: Reference, direction: residuum.Vector, positions: object, wanted: Wanted
) -> None:
    prompt = make_prompt(np.random.default_rng(46), 3 * KV_BLOCK)
    capture = residuum.Capture(sites=SITES, positions=positions)
    steered = adding(direction, scale=0.7)
    for steer, changes in ((), {}), (steered.steer, steered.changes):
        cold = engine.client.generate(prompt, max_tokens=6, ignore_eos=True, steer=steer, capture=ALL)
        warm = engine.client.generate(prompt, max_tokens=6, ignore_eos=True, steer=steer, capture=capture)
        assert read_from_cache(engine, warm) == 2 * KV_BLOCK
        check_capture(engine, reference, warm, wanted=wanted, changes=changes)
        assert warm.token_ids == cold.token_ids


def test_requests_with_different_steering_share_no_cache(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    """One prompt with two vectors, then without. Each steering has its own cache, and equal steering shares it."""
    prompt = make_prompt(np.random.default_rng(42), 2 * KV_BLOCK + 5)
    one, two = adding(direction, scale=0.7), adding(residuum.Vector.from_array(-direction.values[::-1]), scale=0.9)
    for steer, changes, is_warm in (
        (one.steer, one.changes, False),
        (two.steer, two.changes, False),
        ((), {}, False),
        (one.steer, one.changes, True),
        (two.steer, two.changes, True),
        ((), {}, True),
    ):
        plain = engine.client.generate(prompt, max_tokens=6, ignore_eos=True, steer=steer)
        assert read_from_cache(engine, plain) == (2 * KV_BLOCK if is_warm else 0)
        assert reference.shortfall(prompt, plain.token_ids, changes) < MAX_SHORTFALL
        captured = engine.client.generate(prompt, max_tokens=6, ignore_eos=True, steer=steer, capture=ALL)
        check_capture(engine, reference, captured, changes=changes)
        assert captured.token_ids == plain.token_ids


def test_steering_of_the_reply_is_not_shared_with_a_longer_prompt(
    engine: Engine, reference: Reference, direction: residuum.Vector
) -> None:
    """The prompt of the second request has the tokens that the first one generated, steered only in the first."""
    begin = make_prompt(np.random.default_rng(43), KV_BLOCK - 4)
    steered = adding(direction, scale=0.7, positions="generated")
    first = engine.client.generate(begin, max_tokens=40, ignore_eos=True, steer=steered.steer)
    prompt = [*begin, *first.token_ids]
    second = engine.client.generate(prompt, max_tokens=6, ignore_eos=True, steer=steered.steer)
    assert read_from_cache(engine, second) == 0
    changes = adding(direction, scale=0.7, start=len(prompt)).changes
    assert reference.shortfall(prompt, second.token_ids, changes) < MAX_SHORTFALL
