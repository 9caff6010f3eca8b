"""The store and shippers are killed mid-stream with SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.soak import Soak, Tally
from tests.faults.support import DEADLINE, ENVIRONMENT, Capture, Ring, Shippers, Store
from tests.waiting import wait_for

SMALL = {"writers": 2, "length": 1024}


@pytest.fixture
def soak(tmp_path: Path) -> Iterator[Callable[..., Tally]]:
    """A few rounds of `make soak` with a fixed seed."""

    def run(rounds: int, *victims: str, shards: int = 1) -> Tally:
        return Soak(tmp_path, seed=rounds, victims=victims, shards=shards, **SMALL).run(rounds=rounds)

    return run


@pytest.mark.parametrize("shards", [1, 3])
def test_a_store_that_is_killed_again_and_again_has_every_row_once(soak: Callable[..., Tally], shards: int) -> None:
    """After each kill, all acknowledged rows survive. In the end each capture is COMPLETE with all its rows."""
    tally = soak(5, "store", shards=shards)
    assert tally.clean, tally
    assert tally.kills == {"store": 5}
    assert tally.captures >= 2


@pytest.mark.parametrize("shards", [1, 3])
def test_a_store_that_is_killed_while_it_starts_or_with_a_shipper_has_every_row_once(
    soak: Callable[..., Tally], shards: int
) -> None:
    tally = soak(4, "starting store", "both", shards=shards)
    assert tally.clean, tally
    assert set(tally.kills) == {"starting store", "both"}


def test_shippers_that_are_killed_are_started_again_and_every_row_is_there_once(soak: Callable[..., Tally]) -> None:
    tally = soak(5, "shipper")
    assert tally.clean, tally
    assert tally.kills == {"shipper": 5}


@pytest.mark.parametrize("width", [64, 256], ids=["messages", "shared memory"])
def test_the_only_shipper_is_killed_with_rows_in_hand(
    start_store: Callable[..., Store],
    start_ring: Callable[..., Ring],
    start_shippers: Callable[..., Shippers],
    width: int,
) -> None:
    """Acknowledged rows stay; unacknowledged rows go to the next shipper."""
    store, ring = start_store(), start_ring()
    shippers = start_shippers(store.endpoint)
    capture = Capture("only", 32 * 16, width)
    store.open(capture)
    blocks = list(capture.blocks())
    for restarts in (1, 2):
        acked, in_hand, blocks = blocks[:4], blocks[4:8], blocks[8:]
        for block in acked:
            ring.publish_rows(capture, block)
        assert ring.drain(DEADLINE)
        (pid,) = wait_for(shippers.pids, "a running shipper")
        with store.standing_still():  # so it acknowledges nothing
            for block in in_hand:
                ring.publish_rows(capture, block)
            assert shippers.kill(pid)
            wait_for(lambda restarts=restarts: shippers.restarts == restarts, "another shipper")
        assert ring.acked(capture) <= set(store.read(capture).times)
        assert ring.drain(DEADLINE)
    assert not blocks
    store.seal_and_check(capture)


def test_the_soak_prints_its_counts() -> None:
    command = [sys.executable, "-m", "tests.faults.soak", "--rounds", "1", "--victims", "shipper", "--writers", "1"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=4 * DEADLINE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "rows lost 0" in lines
    assert "rows doubled 0" in lines
    assert lines[-1] == "OK"


@pytest.mark.parametrize("field", ["lost", "doubled", "wrong", "incomplete"])
def test_a_soak_that_found_anything_is_not_clean(field: str) -> None:
    assert Tally().clean
    assert not Tally(**{field: 1}).clean
    assert not Tally(troubles=["stuck"]).clean
