"""Requests get rows of the banks in order of arrival. Only requests that need no room go ahead."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.requests.registry import RequestRegistry, Running
from inference_svc.resources.vector_activator import VectorActivator, VectorHold
from inference_svc.resources.vector_cache import VectorCache
from inference_svc.session.reservation import Reservations
from residuum.rpc.errors import Failure
from residuum.v1 import steering_pb2
from residuum.wire.digests import vector_message
from tests.inference.spec_support import spec_of

HIDDEN, KNOWN = 4, 12
LONG, SOON = 20.0, 0.05
"""A wait that must not expire, and one that a test lets expire, in seconds."""


def numbered(number):
    return vector_message(np.full(HIDDEN, number, dtype=np.float32))


async def settle():
    """Let every task run until it waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


class Bench:
    """An activator with vectors 0 to 11 in its cache, and requests that hold some of them until a test ends them."""

    def __init__(self, rows, wait_seconds=LONG):
        self.bank = {}
        self.loading = asyncio.Event()
        self.loading.set()
        cache = VectorCache(KNOWN, 1 << 20, (HIDDEN,), lambda _digest: False)
        for number in range(KNOWN):
            cache.put(numbered(number))
        self.activator = VectorActivator(cache, range(rows), self.load, wait_seconds)
        self.holding = []
        """Names of the requests that got their rows, in order."""
        self.tasks = {}
        self.ends = {}

    async def load(self, rows):
        await self.loading.wait()
        self.bank.update(rows)

    def start(self, name, *numbers):
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name, numbers))

    async def _hold(self, name, numbers):
        async with self.activator.active([numbered(number).digest for number in numbers]) as rows:
            for number in numbers:
                assert self.bank[rows[numbered(number).digest]] == numbered(number).values
            self.holding.append(name)
            await self.ends[name].wait()

    async def end(self, *names):
        for name in names:
            self.ends[name].set()
        await asyncio.gather(*[self.tasks.pop(name) for name in names])
        await settle()

    async def cancel(self, name):
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await settle()

    def check_idle(self):
        assert not self.activator._turns
        assert not self.activator._users
        assert not self.activator._changed.locked()


@asynccontextmanager
async def bench(rows, wait_seconds=LONG):
    made = Bench(rows, wait_seconds)
    yield made
    await made.end(*list(made.tasks))
    made.check_idle()


async def test_a_request_that_needs_many_rows_is_not_passed_by_smaller_ones():
    async with bench(3) as b:
        for name, number in (("one", 1), ("two", 2)):
            b.start(name, number)
        await settle()
        b.start("many", 4, 5, 6)
        await settle()
        b.start("small", 7)  # one row is free
        await settle()
        assert b.holding == ["one", "two"]
        await b.end("one", "two")
        assert b.holding == ["one", "two", "many"]
        await b.end("many")
        assert b.holding[-1] == "small"


async def test_a_request_whose_vectors_are_in_use_goes_ahead():
    async with bench(2) as b:
        b.start("holds", 1)
        await settle()
        b.start("many", 2, 3)
        await settle()
        b.start("shares", 1)
        await settle()
        assert b.holding == ["holds", "shares"]


async def test_a_request_whose_vectors_are_loaded_and_idle_waits_for_its_turn():
    """Otherwise two requests that alternate would keep the rows from one that needs both."""
    async with bench(2) as b:
        b.start("a", 1)
        await settle()
        b.start("was b", 2)
        await settle()
        await b.end("was b")
        b.start("many", 3, 4)
        await settle()
        b.start("b", 2)
        await settle()
        assert b.holding == ["a", "was b"]
        await b.end("a")
        assert b.holding[-1] == "many"
        await b.end("many")
        assert b.holding[-1] == "b"


async def test_loaded_vectors_are_taken_without_a_turn_of_the_event_loop():
    async with bench(3) as b:
        used, idle = numbered(1).digest, numbered(2).digest
        assert b.activator.take_loaded([used]) is None
        b.start("loads", 1, 2)
        await settle()
        await b.end("loads")
        async with VectorHold(b.activator) as hold:
            assert hold.add_loaded([used])
            assert b.bank[hold.rows[used]] == numbered(1).values
            assert hold.add_loaded([used])
            b.start("many", 3, 4, 5)  # needs the row, too
            await settle()
            async with VectorHold(b.activator) as other:
                assert other.add_loaded([used])
                assert not other.add_loaded([idle]), "a request that waits may need its row"
            assert b.holding == ["loads"]
        await settle()
        assert b.holding == ["loads", "many"]


async def test_a_request_that_waits_for_the_end_of_a_load_keeps_its_turn():
    async with bench(2) as b:
        b.start("was idle", 1)
        await settle()
        await b.end("was idle")
        b.loading.clear()
        b.start("loads", 2)
        await settle()
        b.start("next", 3)  # needs the row of vector 1
        await settle()
        b.loading.set()
        while "loads" not in b.holding:
            assert b.activator.take_loaded([numbered(1).digest]) is None
            await asyncio.sleep(0)
        assert b.activator.take_loaded([numbered(1).digest]) is None
        await settle()
        assert b.holding == ["was idle", "loads", "next"]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_vectors_are_released_while_others_are_loaded(is_cancelled):
    async with bench(2) as b:
        b.start("holds", 1)
        await settle()
        b.loading.clear()
        b.start("loads", 2)
        await settle()
        b.start("waits", 3, 4)
        release = asyncio.create_task(b.activator.release([numbered(1).digest]))
        await settle()
        assert numbered(1).digest not in b.activator._users
        if is_cancelled:
            release.cancel()
        b.activator._add_users([numbered(1).digest])  # of "holds", which releases it again
        b.loading.set()
        await asyncio.wait({release})
        await b.end("holds", "loads")
        assert b.holding == ["holds", "loads", "waits"]


async def test_a_request_whose_vectors_are_loaded_starts_no_task(monkeypatch):
    async with bench(2) as b:
        b.start("loads", 1)
        await settle()
        own = steering_pb2.SteeringOperation(add=steering_pb2.Add(digest=numbered(1).digest))
        running = Running("r", spec_of("r", None, steering_pb2.SteeringSpec(operations=[own])), was_registered=False)
        monkeypatch.setattr("inference_svc.session.reservation.unless_interrupted", None)
        async with Reservations(b.activator, None).reserve(running) as hold:
            assert b.bank[hold.rows[numbered(1).digest]] == numbered(1).values


async def test_vectors_that_are_being_loaded_are_not_taken_as_loaded():
    async with bench(2) as b:
        b.loading.clear()
        b.start("loads", 1)
        await settle()
        assert b.activator.take_loaded([numbered(1).digest]) is None
        b.loading.set()


async def test_a_waiter_that_is_cancelled_leaves_the_queue():
    async with bench(2) as b:
        b.start("holds", 1)
        await settle()
        b.start("many", 2, 3)
        await settle()
        b.start("small", 4)
        await settle()
        assert b.holding == ["holds"]
        await b.cancel("many")
        assert b.holding == ["holds", "small"]


async def test_a_waiter_that_times_out_leaves_the_queue():
    async with bench(2, SOON) as b:
        b.start("holds", 1)
        await settle()
        with pytest.raises(Failure) as caught:
            await b.activator.active([numbered(2).digest, numbered(3).digest]).__aenter__()
        assert caught.value.metadata == {"limit": "max_active_vectors"}
        b.start("small", 4)
        await settle()
        assert b.holding == ["holds", "small"]


async def test_requests_behind_a_waiter_that_gives_up_continue_at_once():
    async with bench(2, SOON) as b:
        b.start("holds", 1)
        await settle()
        waiting = asyncio.create_task(b.activator.active([numbered(2).digest, numbered(3).digest]).__aenter__())
        await settle()
        b.activator._wait_seconds = LONG
        b.start("small", 4)
        await settle()
        assert b.holding == ["holds"]
        await asyncio.wait({waiting})
        assert isinstance(waiting.exception(), Failure)
        await settle()
        assert b.holding == ["holds", "small"], "its own timeout has not expired"


async def test_a_waiter_that_is_cancelled_twice_does_not_disturb_a_load():
    """This happens when a client disconnects from a request that is being aborted."""
    async with bench(2) as b:
        b.start("holds", 1, 2)
        await settle()
        b.start("loads", 3)
        b.start("waits", 4, 5)
        await settle()
        b.loading.clear()
        await b.end("holds")
        waiter = b.tasks.pop("waits")
        for _ in range(2):
            waiter.cancel()
            await settle()
        assert b.activator._changed.locked()
        b.start("shares", 3)
        await settle()
        assert b.holding == ["holds"], "no request uses a row that is being written"
        b.loading.set()
        await asyncio.wait({waiter})
        assert waiter.cancelled()
        await settle()
        assert b.holding == ["holds", "loads", "shares"]


async def test_two_waiting_requests_load_a_shared_vector_once():
    async with bench(1) as b:
        b.start("holds", 1)
        await settle()
        b.start("one", 2)
        b.start("two", 2)
        await settle()
        await b.end("holds")
        assert b.holding == ["holds", "one", "two"]


@settings(deadline=None, max_examples=50)
@given(
    st.integers(2, 5),
    st.lists(
        st.tuples(st.sampled_from(["start", "start", "end", "cancel"]), st.sets(st.integers(0, 7), min_size=1)),
        max_size=40,
    ),
)
def test_every_request_is_served_eventually(rows, happenings):
    async def run():
        b = Bench(rows)
        for number, (what, wanted) in enumerate(happenings):
            if what == "start":
                b.start(number, *sorted(wanted)[:rows])
            elif b.tasks:
                name = [*b.tasks][min(wanted) % len(b.tasks)]
                if what == "cancel":
                    await b.cancel(name)
                elif name in b.holding:
                    await b.end(name)
            await settle()
            in_use = len(b.activator._users)
            assert in_use <= rows
        while b.tasks:
            holders = [name for name in b.tasks if name in b.holding]
            waiters = [name for name in b.tasks if name not in b.holding]
            await b.end(*holders)
            assert not waiters or waiters[0] in b.holding, (
                "if no rows are held, the first waiting request gets its rows"
            )
        b.check_idle()

    asyncio.run(run())


# --------------------------------------------------------------------------------------------------------------- holds


async def test_a_hold_of_vectors_grows_and_is_given_back_as_a_whole():
    async with bench(3) as b:
        async with VectorHold(b.activator) as hold:
            await hold.add([numbered(1).digest])
            row = hold.rows[numbered(1).digest]
            await hold.add([numbered(2).digest, numbered(1).digest])
            await hold.add([])
            assert hold.rows[numbered(1).digest] == row
            assert len(set(hold.rows.values())) == 2
            assert b.activator._users == {numbered(number).digest: 1 for number in (1, 2)}
        b.check_idle()


async def test_a_hold_of_vectors_cannot_wait_for_itself():
    """Waiting for itself would also delay other requests."""
    async with bench(2) as b, VectorHold(b.activator) as hold:
        await hold.add([numbered(1).digest])
        with pytest.raises(Failure, match="uses 3 vectors, but at most 2"):
            await hold.add([numbered(2).digest, numbered(3).digest])
        await hold.add([numbered(2).digest])


async def test_vectors_that_could_not_be_added_to_a_hold_are_not_held():
    async with bench(2, SOON) as b:
        b.start("holds", 1)
        await settle()
        async with VectorHold(b.activator) as hold:
            await hold.add([numbered(2).digest])
            with pytest.raises(Failure):
                await hold.add([numbered(3).digest])
            assert [*hold.rows] == [numbered(2).digest]


# -------------------------------------------------------------------------------------------------------------- leases


def test_a_vectors_lease_is_looked_up_without_a_scan():
    class Digest(bytes):
        compared = 0

        def __eq__(self, other):
            Digest.compared += 1
            return bytes(self) == bytes(other)

        __hash__ = bytes.__hash__

    registry = RequestRegistry(600, 10_000)
    for number in range(1000):
        own = steering_pb2.Add(digest=number.to_bytes(32, "big"))
        steering = steering_pb2.SteeringSpec(operations=[steering_pb2.SteeringOperation(add=own)])
        registry.register(spec_of(f"r{number}", None, steering))
    assert registry.is_leased(Digest((999).to_bytes(32, "big")))
    assert not registry.is_leased(Digest(b"x" * 32))
    assert Digest.compared < 10
