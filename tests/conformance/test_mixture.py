"""Random requests of all kinds at once: what the other tests check one by one, in one batch. See `mixture`.

A round of the same requests each time, and more if what depends on timing has not happened in it.
`python -m tests.conformance.mixture` runs more, with other models and engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.mixture.campaign import Setup, run, serving
from tests.conformance.mixture.tally import Tally

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

SEED = 31
MOST_ROUNDS = 10

HAPPENED = (
    "captures: complete",
    "captures: aborted",
    "captures followed",
    "changes of steering during a reply",
    "greedy tokens checked",
    "log-probabilities compared",
    "preemptions",
    "probes: linear probes",
    "rule events: flag",
    "rule events: steer",
    "steps that prefilled and decoded",
)
"""What the rounds must have, so that it tests what it says. Some of it depends on when requests arrive and end."""


def test_random_requests_of_all_kinds_at_once(tmp_path: Path) -> None:
    """Captures in all encodings, steering that clients and rules change, probes, aborts; prompts share beginnings."""
    tally = Tally()
    with serving(Setup("llama"), tmp_path, SEED) as served:
        for number in range(MOST_ROUNDS):
            run(served, SEED, tally, rounds=1, first_round=number)
            if not _lacking(tally):
                break
    assert not tally.faults, tally.report()
    assert not _lacking(tally), tally.report()
    assert tally.counts["rows compared"] > 2500
    assert tally.counts["scores compared"] > 250


def _lacking(tally: Tally) -> list[str]:
    return [name for name in HAPPENED if not tally.counts[name]]
