"""Captures of requests that are broken off: rows are right and gapless, missing rows are named, none is complete."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from tests.conformance.engines import RING_MIB
from tests.conformance.rows import (
    ALL,
    SITES,
    check_aborted,
    check_capture,
    check_complete,
    check_partial,
    everything,
    make_prompt,
)
from tests.reference.tiny import HIDDEN, LAYERS

if TYPE_CHECKING:
    from tests.conformance.engines import Engine
    from tests.conformance.rows import Wanted
    from tests.reference.hf import Reference

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

PROMPT = make_prompt(np.random.default_rng(13), 40)


@dataclass(frozen=True)
class Broken:
    """A request that the test breaks off."""

    way: str
    """One of `WAYS`."""
    prompt: list[int]
    after: int
    """How many tokens the request generates first; 0: it is broken off as soon as it was accepted."""
    sequences: int
    positions: object
    wanted: Wanted


WAYS = ("abort", "dropped stream", "closed client")
SELECTIONS: tuple[tuple[object, Wanted], ...] = (
    (None, everything),
    ("generated", range),
    (residuum.Positions(every=3), lambda prompt, rows: range(0, rows, 3)),
)


def break_off(engine: Engine, broken: Broken) -> str:
    """Start a request and break it off; return its ID."""
    with residuum.Client(engine.inference.endpoint) as client:
        stream = client.stream(
            broken.prompt,
            max_tokens=300,
            ignore_eos=True,
            n=broken.sequences,
            temperature=float(broken.sequences > 1),
            capture=residuum.Capture(sites=SITES, positions=broken.positions),
        )
        for _ in range(broken.after):
            next(stream)
        if broken.way == "abort":
            engine.client.abort(stream.request_id)
            with suppress(residuum.RequestAborted):  # raised unless the request had already ended
                for _ in stream:
                    pass
        elif broken.way == "dropped stream":
            stream.close()
    return stream.request_id


def test_requests_that_are_broken_off_at_random(engine: Engine, reference: Reference) -> None:
    """Thirty requests at once, more than the KV cache holds, and six that run to their end."""
    rng = np.random.default_rng(14)
    broken = []
    for index in range(30):
        positions, wanted = SELECTIONS[index // 3 % len(SELECTIONS)]
        broken.append(
            Broken(
                way=WAYS[index % len(WAYS)],
                prompt=make_prompt(rng, int(rng.integers(1, 150))),
                after=int(rng.integers(0, 70)) if index % 4 else 0,
                sequences=2 if index % 5 == 0 else 1,
                positions=positions,
                wanted=wanted,
            )
        )
    whole = [engine.client.stream(PROMPT[i:], max_tokens=60, ignore_eos=True, capture=ALL) for i in range(6)]
    with ThreadPoolExecutor(len(broken)) as pool:
        names = list(pool.map(lambda one: break_off(engine, one), broken))
    for stream in whole:
        for _ in stream:
            pass
        check_capture(engine, reference, stream.reply)
    aborted = 0
    for name, one in zip(names, broken, strict=True):
        if (
            engine.client.manifest(name, wait=60).state == "complete"
        ):  # its last token was delivered before it was broken off
            check_complete(engine, reference, name, wanted=one.wanted)
        else:
            aborted += 1
            check_aborted(engine, reference, name, one.wanted)
            with pytest.raises(residuum.AbortedCapture):
                engine.client.activations(name)
    assert aborted > len(broken) // 2


def test_a_long_prompt_that_is_broken_off_before_its_first_token(engine: Engine, reference: Reference) -> None:
    """Other requests take most of each step, so the prompt waits or is computed in chunks."""
    rng = np.random.default_rng(15)
    others = [engine.client.stream(make_prompt(rng, 400), max_tokens=2, capture=ALL) for _ in range(3)]
    stream = engine.client.stream(make_prompt(rng, 450), max_tokens=2, capture=ALL)
    stream.close()
    for other in others:
        for _ in other:
            pass
        check_capture(engine, reference, other.reply)
    check_aborted(engine, reference, stream.request_id)


def test_rows_that_are_shed_are_named(engine: Engine, reference: Reference) -> None:
    """The store is stopped until the ring is full. Requests that may shed rows continue."""
    capture = residuum.Capture(sites=SITES, overflow="shed")
    held = (RING_MIB << 20) // (len(SITES) * LAYERS * HIDDEN * 4)  # positions that the ring holds
    assert held < 7 * 400
    try:
        with engine.held():
            streams = [
                engine.client.stream(PROMPT[i:], max_tokens=400, ignore_eos=True, capture=capture) for i in range(8)
            ]
            engine.store.process.send_signal(signal.SIGSTOP)
        for stream in streams:
            for _ in stream:
                pass
    finally:
        engine.store.process.send_signal(signal.SIGCONT)
    incomplete = 0
    for stream in streams:
        manifest = engine.client.manifest(stream.reply, wait=60)
        if manifest.state == "complete":
            check_capture(engine, reference, stream.reply)
        else:
            incomplete += 1
            assert manifest.reason == "OVERFLOW"
            assert manifest.missing
            check_partial(engine, reference, stream.request_id)
            with pytest.raises(residuum.IncompleteCapture):
                engine.client.activations(stream.reply)
    assert incomplete
    after = engine.client.generate(PROMPT, max_tokens=3, ignore_eos=True, capture=ALL)
    check_capture(engine, reference, after)
