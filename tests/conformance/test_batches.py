"""Many requests in one batch: each gets exactly its own rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.engines import CHUNK
from tests.conformance.rows import ALL, SITES, check_aborted, check_capture, everything, make_prompt
from tests.reference.tiny import LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.conformance.engines import Engine
    from tests.conformance.rows import Wanted
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]


def _explicit(prompt: int, rows: int) -> Iterable[int]:
    return [p for p in range(rows) if p in {0, 5, 6, 30, prompt - 1}]


# Position selections, and the positions that each selects for a number of prompt tokens and of rows.
SELECTIONS: dict[str, tuple[object, Wanted]] = {
    "all": (None, everything),
    "prompt": ("prompt", lambda prompt, rows: range(prompt)),
    "generated": ("generated", range),
    "last prompt token": ("last_prompt", lambda prompt, rows: [prompt - 1]),
    "positions by name": ([0, 5, 6, 30, -1], _explicit),
    "ranges": ([(2, 9), (33, 40)], lambda prompt, rows: {*range(2, 10), *range(33, 41)} & set(range(rows))),
    "the prompt's end": (range(-4, 0), lambda prompt, rows: range(max(prompt - 4, 0), prompt)),
    "from the prompt's end on": ([(-2, None)], lambda prompt, rows: range(max(prompt - 2, 0), rows)),
    "all but the prompt's ends": ([(1, -2)], lambda prompt, rows: range(1, prompt - 1)),
    "every seventh": (residuum.Positions(every=7), lambda prompt, rows: range(0, rows, 7)),
    "every third generated": (
        residuum.Positions(phases=["generated"], every=3),
        lambda prompt, rows: [p for p in range(prompt, rows) if p % 3 == 0],
    ),
    "beyond the end": ([(400, None)], lambda prompt, rows: range(400, rows)),
}


def test_64_requests_of_all_kinds_at_once(engine: Engine, reference: Reference) -> None:
    """Random prompts, sites, layers, positions and lengths. Half of the requests sample, half of these with a seed.

    Half of the requests wait, and take the places of ended ones in the batch.
    """
    rng = np.random.default_rng(5)
    asked = []
    with engine.held():
        for index in range(64):
            layers = sorted({int(layer) for layer in rng.integers(0, LAYERS, size=int(rng.integers(1, LAYERS + 1)))})
            sites = [str(site) for site in rng.permutation(SITES)[: int(rng.integers(1, len(SITES) + 1))]]
            selection, wanted = list(SELECTIONS.values())[index % len(SELECTIONS)]
            stream = engine.client.stream(
                make_prompt(rng, int(rng.integers(1, 100))),
                max_tokens=int(rng.integers(1, 50)),
                ignore_eos=True,
                temperature=float(index % 2),
                seed=index if index % 4 == 1 else None,
                capture=residuum.Capture(layers=layers, sites=sites, positions=selection),
            )
            asked.append((stream, sites, layers, wanted))
    for stream, sites, layers, wanted in asked:
        for _ in stream:
            pass
        check_capture(engine, reference, stream.reply, sites=sites, layers=layers, wanted=wanted)
    steps = engine.journal.steps_of(*(stream.request_id for stream, *_ in asked))
    assert max(len(step.chunks) for step in steps) > 16, "many requests ran at once"
    assert sum(step.is_mixed for step in steps) > 10, "steps decoded and prefilled together"


def test_rows_keep_their_request_as_the_batch_changes(engine: Engine, reference: Reference) -> None:
    """Requests end in another order than they started. The last prompt chunk of some is one token."""
    rng = np.random.default_rng(6)
    sizes = [(20, 60), (3, 5), (40, 30), (1, 12), (9, 45), (30, 20), (1, 40), (65, 3), (1, 2), (129, 25), (64, 10)]
    with engine.held():
        streams = [
            engine.client.stream(make_prompt(rng, size), max_tokens=count, ignore_eos=True, capture=ALL)
            for size, count in sizes
        ]
    for stream in streams:
        for _ in stream:
            pass
        check_capture(engine, reference, stream.reply)
    steps = engine.journal.steps_of(*(stream.request_id for stream in streams))
    assert any(step.is_mixed for step in steps)


def test_a_chunk_of_one_token_in_a_batch(engine: Engine, reference: Reference) -> None:
    """Running requests leave room for all but one token of a prompt."""
    rng = np.random.default_rng(7)
    for _ in range(20):  # repeat if a running request ends before the prompt is computed or before it is closed
        running = [
            engine.client.stream(make_prompt(rng, 4), max_tokens=450, ignore_eos=True, capture=ALL) for _ in range(4)
        ]
        for stream in running:
            next(stream)
        room = CHUNK - len(running)
        reply = engine.client.generate(make_prompt(rng, room + 1), max_tokens=5, ignore_eos=True, capture=ALL)
        for stream in running:
            stream.close()
        check_capture(engine, reference, reply)
        ends = {engine.client.manifest(stream.request_id, wait=60).state for stream in running}
        if engine.journal.chunks(reply.request_id)[:2] == [(0, room), (room, 1)] and ends == {"aborted"}:
            break
    else:
        pytest.fail("no chunk had one token")
    for stream in running:
        check_aborted(engine, reference, stream.request_id)


@pytest.mark.parametrize("size", [CHUNK - 20, CHUNK, 2 * CHUNK])
def test_a_seeded_request_whose_prompt_is_computed_in_chunks(engine: Engine, reference: Reference, size: int) -> None:
    """A step that computes only a part of a prompt draws no random numbers: the reply is the same as without chunks."""
    rng = np.random.default_rng(16)
    prompt = make_prompt(rng, size)
    asked = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "capture": ALL}
    alone = engine.client.generate(prompt, seed=1, **asked)
    check_capture(engine, reference, alone)
    assert len(_chunks(engine, alone, size)) == -(-size // CHUNK)
    for _ in range(10):  # the engine may get the requests in any order
        with engine.held():
            neighbours = [
                engine.client.stream(make_prompt(rng, CHUNK - 14), seed=2, **asked),
                engine.client.stream(make_prompt(rng, 5), **asked),
            ]
            stream = engine.client.stream(prompt, seed=1, **asked)
            neighbours.append(engine.client.stream(make_prompt(rng, CHUNK), seed=3, **asked))
        for each in [stream, *neighbours]:
            for _ in each:
                pass
            check_capture(engine, reference, each.reply)
        assert stream.reply.token_ids == alone.token_ids
        if len(_chunks(engine, stream.reply, size)) > len(_chunks(engine, alone, size)):
            break
    else:
        pytest.fail("the prompt never shared its steps with other requests")
    assert engine.client.generate(prompt, seed=2, **asked).token_ids != alone.token_ids


def _chunks(engine: Engine, reply: residuum.Reply, prompt_tokens: int) -> list[int]:
    """Return how many tokens of a reply's prompt each step computed."""
    return [count for first, count in engine.journal.chunks(reply.request_id) if first < prompt_tokens]
