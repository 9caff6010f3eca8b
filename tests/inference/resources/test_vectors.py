"""Steering vectors: the cache in host memory, and the rows of the banks."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from inference_svc.resources.vector_activator import VectorActivator
from inference_svc.resources.vector_cache import VectorCache, cache_capacity, vector_name
from residuum.rpc.errors import Failure
from residuum.v1 import tensor_pb2
from residuum.wire.digests import digest_of_bytes, vector_message

HIDDEN = 4
SOON = 0.05
"""A wait that a test lets expire, in seconds."""
LONG = 20.0
"""A wait that must not expire."""


def vector(*values):
    return vector_message(np.array(values or (1,) * HIDDEN, dtype=np.float32))


def numbered(number):
    return vector(*[float(number)] * HIDDEN)


def message(values, dtype=tensor_pb2.DATA_TYPE_FLOAT32, digest=None):
    digest = digest_of_bytes(dtype, values) if digest is None else digest
    return tensor_pb2.Vector(digest=digest, dtype=dtype, values=values)


class Users:
    """Replaces the registry: the names of vectors that requests need."""

    def __init__(self):
        self.digests = set()

    def __call__(self, digest):
        return digest in self.digests


@pytest.fixture
def users():
    return Users()


@pytest.fixture
def cache(users):
    return VectorCache(3, 1 << 20, (HIDDEN,), users)


BAD_VECTORS = {
    "float16": (
        message(b"\0" * 8, tensor_pb2.DATA_TYPE_FLOAT16),
        "WRONG_DTYPE",
        {"dtype": "float16"},
    ),
    "no dtype": (message(b"\0" * 16, 0, digest=b"d" * 32), "WRONG_DTYPE", {"dtype": "unknown"}),
    "short": (vector(1.0, 2.0), "WRONG_LENGTH", {"length": "2", "hidden_size": "4"}),
    "empty": (message(b""), "WRONG_LENGTH", {"length": "0", "hidden_size": "4"}),
    "torn": (message(b"\0" * 18, digest=b"d" * 32), "WRONG_LENGTH", {"length": "4", "hidden_size": "4"}),
    "digest": (
        message(b"\0" * 16, digest=b"d" * 32),
        "DIGEST_MISMATCH",
        {"digest": (b"d" * 32).hex()},
    ),
    "NaN": (vector(1, float("nan"), 1, 1), "BAD_VALUES", {"digest": vector(1, float("nan"), 1, 1).digest.hex()}),
    "infinity": (
        vector(1, -float("inf"), 1, 1),
        "BAD_VALUES",
        {"digest": vector(1, -float("inf"), 1, 1).digest.hex()},
    ),
}


@pytest.mark.parametrize(("bad", "reason", "metadata"), BAD_VECTORS.values(), ids=BAD_VECTORS)
def test_bad_vectors_are_refused_and_not_kept(cache, bad, reason, metadata):
    with pytest.raises(Failure) as caught:
        cache.put(bad)
    assert (caught.value.reason_name, caught.value.metadata) == (reason, metadata)
    assert cache.missing([bad.digest]) == [bad.digest]


def test_a_vector_that_was_put_is_in_the_cache(cache):
    cache.put(numbered(1))
    cache.put(numbered(1))  # a second time does no harm
    assert cache.get(numbered(1).digest) == numbered(1).values
    assert cache.missing([numbered(1).digest]) == []


def test_missing_vectors_are_named_once_and_in_order(cache):
    cache.put(numbered(2))
    one, two, three = (numbered(number).digest for number in (1, 2, 3))
    assert cache.missing([three, one, two, three]) == [three, one]


def test_the_least_recently_used_vector_is_evicted_first(cache):
    for number in (1, 2, 3):
        cache.put(numbered(number))
    cache.missing([numbered(1).digest])  # asking for a vector counts as a use
    cache.put(numbered(4))
    assert cache.missing([numbered(number).digest for number in (1, 2, 3, 4)]) == [numbered(2).digest]


def test_a_vector_in_use_is_not_dropped(cache, users):
    for number in (1, 2, 3):
        cache.put(numbered(number))
    users.digests = {numbered(1).digest, numbered(2).digest}
    cache.put(numbered(4))
    assert cache.missing([numbered(number).digest for number in (1, 2, 3, 4)]) == [numbered(3).digest]


def test_a_full_cache_is_an_error_and_changes_nothing(cache, users):
    kept = [numbered(number) for number in (1, 2, 3)]
    for item in kept:
        cache.put(item)
    users.digests = {item.digest for item in kept}
    with pytest.raises(Failure, match=r"full with 3 vectors.*--max-vectors") as caught:
        cache.put(numbered(4))
    assert (caught.value.reason_name, caught.value.metadata) == ("LIMIT_REACHED", {"limit": "max_vectors"})
    assert cache.missing([item.digest for item in [*kept, numbered(4)]]) == [numbered(4).digest]
    cache.put(kept[0])  # a vector that is in the cache needs no room


def test_a_vector_that_a_request_needs_stays_when_it_is_sent_again_under_a_smaller_limit():
    """The operator may lower a tenant's limit while the service runs."""
    kept = [numbered(number) for number in (1, 2)]
    names = [vector_name("alice", item.digest) for item in kept]
    cache = VectorCache(100, 1 << 20, (HIDDEN,), names.__contains__)
    for item in kept:
        cache.put(item, "alice", 2 * 4 * HIDDEN)
    cache.put(kept[0], "alice", 4 * HIDDEN)
    assert cache.missing(names) == []
    with pytest.raises(Failure, match="your running requests need all of the kept ones"):
        cache.put(numbered(3), "alice", 4 * HIDDEN)
    assert cache.missing(names) == []


def test_a_cache_that_is_full_of_bytes_names_the_limit_of_bytes():
    kept = [numbered(number) for number in (1, 2)]
    cache = VectorCache(100, 2 * 4 * HIDDEN, (HIDDEN,), lambda name: name in {item.digest for item in kept})
    for item in kept:
        cache.put(item)
    with pytest.raises(Failure, match=r"full with 2 vectors.*--max-vector-mib") as caught:
        cache.put(numbered(3))
    assert (caught.value.reason_name, caught.value.metadata) == ("LIMIT_REACHED", {"limit": "max_vector_mib"})


@pytest.mark.parametrize("tenant", ["", "alice"])
def test_eviction_does_not_search_vectors_in_use_repeatedly(tenant):
    """Of 400 vectors, the 200 oldest are in use. Then 1,000 new ones are added, one after the other."""
    held = {vector_name(tenant, numbered(number).digest) for number in range(200)}
    asked = []
    cache = VectorCache(
        10_000 if tenant else 400, 1 << 30, (HIDDEN,), lambda name: bool(asked.append(name)) or name in held
    )
    limit = {"tenant": tenant, "max_bytes": 400 * 4 * HIDDEN} if tenant else {}
    for number in range(10):
        cache.put(numbered(-1 - number), "bob")  # a tenant's own limit does not look at other tenants' vectors
    for number in range(1400):
        cache.put(numbered(number), **limit)
    assert cache.missing(held) == []
    assert len(asked) < 3000
    names = [vector_name(tenant, numbered(number).digest) for number in range(1300, 1400)]
    assert cache.missing(names) == []
    assert cache.num_vectors == (410 if tenant else 400)


def test_vectors_of_several_widths_share_the_memory():
    """Eight bytes for each of 4 elements, of which the cache keeps at most 40."""
    cache = VectorCache(100, 40 * 4, (4, 16), lambda name: name == numbered(0).digest)
    wide = [vector(*[float(number)] * 16) for number in range(3)]
    for item in (numbered(0), wide[0], wide[1]):
        cache.put(item)
    assert cache.num_vectors == 3
    cache.put(wide[2])
    assert cache.missing([item.digest for item in (numbered(0), *wide)]) == [wide[0].digest]
    cache.check_room([16, 16, 4, 4])
    with pytest.raises(Failure, match="of 176 bytes in total, but the service keeps at most 100 vectors and 160 bytes"):
        cache.check_room([16, 16, 4, 4, 4])
    cache.check_width(wide[1].digest, 16, "steering")
    with pytest.raises(Failure, match="of steering has 16 elements, but the rows that it is for have 4") as caught:
        cache.check_width(wide[1].digest, 4, "steering")
    assert caught.value.reason_name == "WRONG_LENGTH"
    assert caught.value.metadata == {"length": "16", "width": "4", "field": "steering"}
    with pytest.raises(Failure, match="has 5 elements, but the rows of this model have 4 or 16"):
        cache.put(vector(*range(5)))


def test_more_vectors_than_the_cache_holds_are_an_error(cache):
    cache.check_room([HIDDEN] * 3)
    with pytest.raises(Failure, match="uses 4 vectors of 64 bytes in total, but the service keeps at most 3") as caught:
        cache.check_room([HIDDEN] * 4)
    assert (caught.value.reason_name, caught.value.metadata) == (
        "LIMIT_REACHED",
        {"limit": "max_vectors", "needed": "4", "allowed": "3"},
    )


@pytest.mark.parametrize("size", [-0.0, 1e-31, 1.1e30])
def test_a_vector_without_a_direction_that_float32_can_tell(cache, size):
    bad = vector(0, 0, size, 0)
    cache.put(bad)  # it can be added
    with pytest.raises(Failure, match="from 1e-30 to 1e\\+30") as caught:
        cache.check_direction(bad.digest)
    assert (caught.value.reason_name, caught.value.metadata) == ("BAD_VALUES", {"digest": bad.digest.hex()})


@pytest.mark.parametrize("size", [1.1e-30, 1.0, 9e29])
def test_a_vector_with_a_direction(cache, size):
    good = vector(0, 0, size, 0)
    cache.put(good)
    cache.check_direction(good.digest)


def test_vectors_are_kept_within_a_number_and_within_memory():
    assert cache_capacity(1000, 256, 4096) == 1000
    assert cache_capacity(1000, 1, 4096) == 64
    assert cache_capacity(1000, 1, 1 << 20) == 1


class Bank:
    """Replaces the workers' banks. Loading waits until `gate` is set, and fails with `error`."""

    def __init__(self):
        self.rows = {}
        self.loads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.error = None

    async def load(self, rows):
        self.loads += 1
        self.entered.set()
        await self.gate.wait()
        if self.error:
            raise self.error
        self.rows.update(rows)


class Bench:
    """An activator of two rows, with vectors 1 to 5 in its cache."""

    def __init__(self, wait_seconds):
        self.bank = Bank()
        self.cache = VectorCache(5, 1 << 20, (HIDDEN,), lambda _digest: False)
        self.activator = VectorActivator(self.cache, range(2), self.bank.load, wait_seconds)
        for number in range(1, 6):
            self.cache.put(numbered(number))

    def active(self, *numbers):
        return self.activator.active([numbered(number).digest for number in numbers])

    async def hold(self, numbers, until):
        async with self.active(*numbers) as rows:
            self.check(rows)
            await until.wait()

    def check(self, rows):
        """Check that the rows hold the expected vectors."""
        for digest, row in rows.items():
            assert self.bank.rows[row] == self.cache.get(digest)

    async def check_untouched(self):
        """Check that every row can be taken: a failed request left nothing behind."""
        async with self.active(1, 2) as rows:
            self.check(rows)
            assert sorted(rows.values()) == [0, 1]
        async with self.active(3, 4) as rows:
            self.check(rows)


@pytest.fixture
async def bench():
    return Bench(LONG)


async def settle():
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_vectors_need_no_rows(bench):
    async with bench.active() as rows:
        assert rows == {}
    assert not bench.bank.loads


async def test_requests_share_a_vectors_row(bench):
    async with bench.active(1) as first, bench.active(1, 2) as second:
        assert first.items() <= second.items()
        bench.check(second)
    assert bench.bank.loads == 2


async def test_an_idle_vector_stays_for_the_next_request(bench):
    async with bench.active(1):
        pass
    async with bench.active(1) as rows:
        bench.check(rows)
    assert bench.bank.loads == 1


async def test_the_row_that_was_idle_for_longest_is_reused(bench):
    for number in (1, 2, 1):
        async with bench.active(number):
            pass
    async with bench.active(3):
        pass
    async with bench.active(1):  # still there
        pass
    assert bench.bank.loads == 3


async def test_a_row_is_shared_until_its_last_user_is_done(bench):
    async with AsyncExitStack() as first:
        await first.enter_async_context(bench.active(1, 2))
        async with bench.active(1):
            await first.aclose()
            async with bench.active(3) as rows:  # takes 2's row, not 1's
                bench.check(rows)
                async with bench.active(1) as kept:
                    bench.check(kept)
    assert bench.bank.loads == 2


async def test_a_row_in_use_is_not_taken_though_it_was_used_before_others(bench):
    async with bench.active(1) as held:
        async with bench.active(2):
            pass
        async with bench.active(3) as rows:
            bench.check(rows)
            bench.check(held)


async def test_a_request_does_not_take_a_row_from_itself(bench):
    """One of its vectors is active and idle, so that row is not free for the other vector."""
    async with bench.active(1):
        pass
    done = asyncio.Event()
    holder = asyncio.create_task(bench.hold((2,), done))
    await settle()
    both = asyncio.create_task(bench.hold((1, 3), done))
    await settle()
    assert not both.done()
    assert bench.bank.loads == 2
    done.set()
    await asyncio.gather(holder, both)
    assert bench.bank.loads == 3


async def test_a_request_waits_for_room(bench):
    done = asyncio.Event()
    holder = asyncio.create_task(bench.hold((1, 2), done))
    waiter = asyncio.create_task(bench.hold((3,), done))
    await settle()
    assert bench.bank.loads == 1
    holder.cancel()
    await settle()
    assert bench.bank.loads == 2
    done.set()
    await waiter
    await bench.check_untouched()


async def test_a_request_whose_vectors_are_active_does_not_wait(bench):
    async with bench.active(1, 2), bench.active(2, 1) as rows:
        bench.check(rows)


async def test_waiting_ends_with_a_failure():
    bench = Bench(SOON)
    async with bench.active(1, 2):
        with pytest.raises(Failure) as caught:
            await bench.active(3).__aenter__()
        assert (caught.value.reason_name, caught.value.metadata) == ("LIMIT_REACHED", {"limit": "max_active_vectors"})
    await bench.check_untouched()


async def test_more_vectors_than_rows_fail_at_once(bench):
    with pytest.raises(Failure) as caught:
        await bench.active(1, 2, 3).__aenter__()
    assert caught.value.reason_name == "LIMIT_REACHED"
    assert caught.value.metadata == {"limit": "max_active_vectors", "needed": "3", "allowed": "2"}
    assert "uses 3 vectors, but at most 2" in caught.value.message
    await bench.check_untouched()


async def test_an_evicted_vector_is_reported_as_missing(bench):
    with pytest.raises(Failure) as caught:
        await bench.active(9, 8).__aenter__()
    missing = ",".join(numbered(number).digest.hex() for number in (9, 8))
    assert (caught.value.reason_name, caught.value.metadata) == ("MISSING_VECTORS", {"digests": missing})
    assert not bench.bank.loads
    await bench.check_untouched()


async def test_a_load_that_fails_leaves_no_trace(bench):
    bench.bank.error = RuntimeError("the worker is gone")
    with pytest.raises(RuntimeError, match="worker is gone"):
        await bench.active(1, 2).__aenter__()
    bench.bank.error = None
    async with bench.active(1) as rows:  # loaded again: the row was not left half loaded
        bench.check(rows)
    await bench.check_untouched()


async def test_cancelling_a_wait_leaves_no_trace(bench):
    async with bench.active(1, 2):
        waiter = asyncio.create_task(bench.hold((3, 4), asyncio.Event()))
        await settle()
        waiter.cancel()
        await asyncio.wait({waiter})
        assert waiter.cancelled()
    await bench.check_untouched()


async def test_cancelling_a_load_leaves_no_trace(bench):
    bench.bank.gate.clear()
    loader = asyncio.create_task(bench.hold((1, 2), asyncio.Event()))
    await bench.bank.entered.wait()
    loader.cancel()
    await asyncio.wait({loader})
    assert loader.cancelled()
    bench.bank.gate.set()
    await bench.check_untouched()


async def test_no_request_uses_a_row_that_is_being_loaded(bench):
    bench.bank.gate.clear()
    done = asyncio.Event()
    tasks = [asyncio.create_task(bench.hold((1,), done)) for _ in range(2)]
    await settle()
    bench.bank.gate.set()
    done.set()
    await asyncio.gather(*tasks)  # each request checks its row when it gets it
    assert bench.bank.loads == 1


async def test_a_request_that_is_cancelled_gives_its_rows_back(bench):
    holder = asyncio.create_task(bench.hold((1, 2), asyncio.Event()))
    await settle()
    holder.cancel()
    await asyncio.wait({holder})
    await bench.check_untouched()
