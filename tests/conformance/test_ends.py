"""Ends of requests: by a token, a text or the length, in several sequences; and request IDs in use."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from residuum.wire.ids import make_id
from tests.conformance.rows import ALL, SITES, check_capture, make_prompt
from tests.conformance.steering import adding
from tests.reference.tiny import EOS, LAYERS

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

PROMPT = make_prompt(np.random.default_rng(12), 40)
SEED = 1
"""The temperature at which four sequences differ from their first token on."""


@pytest.mark.parametrize("generated", [1, 2, 7, 33])
def test_the_end_token(engine: Engine, reference: Reference, generated: int) -> None:
    """The model is steered towards a token: from one position on, its logit is the largest."""
    vector = residuum.Vector.from_array(reference.output_weights(EOS))
    start = len(PROMPT) + generated - 2  # the row that predicts the last token
    steered = adding(vector, layer=LAYERS - 1, scale=100.0, positions=[(start, None)], start=start)
    with_neighbours = [engine.client.stream(PROMPT[5:], max_tokens=60, ignore_eos=True, capture=ALL) for _ in range(3)]
    reply = engine.client.generate(PROMPT, max_tokens=60, capture=ALL, steer=steered.steer)
    assert reply.finish_reason == "stop"
    assert reply.token_ids[-1] == EOS
    assert len(reply.token_ids) == generated
    check_capture(engine, reference, reply, changes=steered.changes)
    for stream in with_neighbours:
        for _ in stream:
            pass
        check_capture(engine, reference, stream.reply)


@pytest.mark.parametrize("interval", [1, 5])
def test_rows_leave_at_the_flush_interval(engine: Engine, reference: Reference, interval: int) -> None:
    """A follower does not wait for 32 tokens."""
    watched = residuum.Capture(layers=[1], positions="generated", flush_interval=interval)
    (before,) = engine.client.stats()
    with engine.paced(), engine.client.stream(PROMPT, max_tokens=60, ignore_eos=True, capture=watched) as stream:
        pieces = engine.client.follow(stream.request_id)
        early = [next(pieces) for _ in range(3)]
        assert engine.client.manifest(stream.request_id).state == "open"
        for _ in stream:
            pass
    assert sum(len(piece.positions) for piece in (*early, *pieces)) == 59
    (after,) = engine.client.stats()
    # The store's chunks, because a follower that is late gets several as one.
    assert after.num_chunks - before.num_chunks == math.ceil(59 / interval)
    check_capture(engine, reference, stream.reply, sites=["resid_post"], layers=[1], wanted=range)


def test_a_stop_string(engine: Engine, reference: Reference) -> None:
    """The service finds the stop string while the engine computes on. The rows beyond it belong to no capture."""
    with engine.client.stream(PROMPT, max_tokens=40, ignore_eos=True) as stream:
        pieces = [delta.text for delta in stream]
    text = "".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    stop, end = next(
        (piece, end)
        for piece, end in zip(pieces[8:], ends[8:], strict=True)
        if len(piece.strip()) > 2 and piece.isascii() and text.find(piece) + len(piece) == end
    )
    reply = engine.client.generate(PROMPT, max_tokens=40, ignore_eos=True, stop=[stop], capture=ALL)
    assert reply.finish_reason == "stop"
    assert reply.sequences[0].stop_reason == stop
    assert reply.text == text[: end - len(stop)]
    rows = check_capture(engine, reference, reply)
    computed = max(first + count for first, count in engine.journal.chunks(reply.request_id))
    assert computed > 1 + max(row.position for row in rows), "the engine computed beyond the stop string"


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_four_sequences(engine: Engine, reference: Reference, max_tokens: int) -> None:
    capture = residuum.Capture(layers=[0, 3], sites=SITES)
    reply = engine.client.generate(
        PROMPT, n=4, temperature=1.0, seed=SEED, max_tokens=max_tokens, ignore_eos=True, capture=capture
    )
    assert len({sequence.token_ids for sequence in reply.sequences}) == 4
    rows = check_capture(engine, reference, reply, layers=(0, 3))
    assert {row.sequence for row in rows} == {0, 1, 2, 3}


def test_sequences_of_a_prompt_of_one_token(engine: Engine, reference: Reference, direction: residuum.Vector) -> None:
    steered = adding(direction, scale=0.7)
    reply = engine.client.generate(
        PROMPT[:1], n=3, temperature=1.0, max_tokens=35, ignore_eos=True, capture=ALL, steer=steered.steer
    )
    check_capture(engine, reference, reply, changes=steered.changes)


def test_the_id_of_a_running_request_is_refused_and_the_first_request_continues(
    engine: Engine, reference: Reference
) -> None:
    name = make_id()
    stream = engine.client.stream(PROMPT, max_tokens=60, ignore_eos=True, capture=ALL, request_id=name)
    next(stream)
    with pytest.raises(residuum.RequestExists, match=name):
        engine.client.generate(PROMPT[:5], max_tokens=3, capture=ALL, request_id=name)
    for _ in stream:
        pass
    with pytest.raises(residuum.CaptureExists, match=name):
        engine.client.generate(PROMPT[:5], max_tokens=3, capture=ALL, request_id=name)
    check_capture(engine, reference, stream.reply)


def test_one_of_many_with_the_same_id_runs(engine: Engine, reference: Reference) -> None:
    name = make_id()

    def ask(size: int) -> residuum.Reply | None:
        try:
            return engine.client.generate(PROMPT[:size], max_tokens=20, ignore_eos=True, capture=ALL, request_id=name)
        except (residuum.RequestExists, residuum.CaptureExists):
            return None

    with ThreadPoolExecutor(8) as pool:
        replies = [reply for reply in pool.map(ask, range(1, 9)) if reply]
    assert len(replies) == 1
    check_capture(engine, reference, replies[0])
