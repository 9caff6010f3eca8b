"""Requests by ID, with a clock that the test moves."""

from __future__ import annotations

import pytest

from inference_svc.requests import registry as requests_module
from inference_svc.requests.registry import RequestRegistry
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, steering_pb2
from residuum.wire.ids import is_valid_id
from residuum.wire.tokens import split_path
from tests.inference.spec_support import spec_of

TIME_TO_LIVE = 600.0


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    return RequestRegistry(TIME_TO_LIVE, max_registrations=3, clock=clock)


def make_spec(request_id="r", digest=None):
    operations = [steering_pb2.SteeringOperation(add=steering_pb2.Add(digest=digest))] if digest else []
    steering = steering_pb2.SteeringSpec(operations=operations) if operations else None
    return spec_of(request_id, None, steering)


def other_spec(request_id="r"):
    return spec_of(request_id, capture_pb2.CaptureSpec())


def reason_of(call, *arguments):
    with pytest.raises(Failure) as caught:
        call(*arguments)
    return caught.value.reason_name, caught.value.metadata


def test_a_registration_is_used_once(registry):
    registry.register(make_spec())
    running = registry.start_registered("r")
    assert (running.request_id, running.spec) == ("r", make_spec())
    assert registry.running == (running,)
    assert reason_of(registry.start_registered, "r") == ("UNKNOWN_REQUEST", {"request_id": "r"})


def test_the_same_spec_again_is_answered_as_before(registry):
    assert registry.register(make_spec()) == registry.register(make_spec()) == "r"
    registry.start_registered("r")


def test_another_spec_under_the_same_id_is_refused_and_the_first_stays(registry):
    registry.register(make_spec())
    assert reason_of(registry.register, other_spec()) == ("REQUEST_EXISTS", {"request_id": "r"})
    assert registry.start_registered("r").spec == make_spec()


def test_ids_are_made_when_none_is_given(registry):
    first, second = registry.register(make_spec("")), registry.register(make_spec(""))
    assert first != second
    assert is_valid_id(first)
    assert is_valid_id(registry.start_inline(make_spec("")).request_id)
    assert registry.start_registered(first).request_id == first


def test_a_registration_lapses(registry, clock):
    registry.register(make_spec())
    clock.now += TIME_TO_LIVE
    assert reason_of(registry.start_registered, "r") == ("UNKNOWN_REQUEST", {"request_id": "r"})


def test_a_registration_lasts_until_it_lapses(registry, clock):
    registry.register(make_spec())
    clock.now += TIME_TO_LIVE - 0.001
    registry.start_registered("r")


def test_registering_again_renews(registry, clock):
    registry.register(make_spec("renewed"))
    registry.register(make_spec("left"))
    clock.now += TIME_TO_LIVE - 1
    registry.register(make_spec("renewed"))
    clock.now += 2
    assert reason_of(registry.start_registered, "left")[0] == "UNKNOWN_REQUEST"
    registry.start_registered("renewed")


def test_a_lapsed_id_may_be_registered_with_another_spec(registry, clock):
    registry.register(make_spec())
    clock.now += TIME_TO_LIVE
    registry.register(other_spec())
    assert registry.start_registered("r").spec == other_spec()


def test_too_many_registrations_are_refused_until_one_is_gone(registry, clock):
    for name in "abc":
        registry.register(make_spec(name))
    assert reason_of(registry.register, make_spec("d")) == ("LIMIT_REACHED", {"limit": "max_registrations"})
    registry.register(make_spec("a"))  # known already: needs no more room
    registry.start_registered("b")
    registry.register(make_spec("d"))


def test_lapsed_registrations_make_room(registry, clock):
    for name in "abc":
        registry.register(make_spec(name))
    clock.now += TIME_TO_LIVE
    registry.register(make_spec("d"))


@pytest.mark.parametrize("start", ["register", "start_inline"])
def test_an_id_is_refused_while_its_request_runs_and_free_when_it_has_ended(registry, start):
    running = registry.start_inline(make_spec())
    assert reason_of(getattr(registry, start), make_spec())[0] == "REQUEST_EXISTS"
    registry.end(running)
    assert registry.running == ()
    getattr(registry, start)(make_spec())


def test_requests_with_the_same_id_have_different_names_in_the_engine(registry):
    """The workers and the store still have the first one's rows and changes when the second one starts."""
    first = registry.start_inline(make_spec(), "alice")
    registry.end(first)
    second = registry.start_inline(make_spec(), "alice")
    assert first.path != second.path
    assert split_path(first.path) == ("alice", "r", first.attempt)


def test_an_inline_request_cannot_take_a_registered_id(registry):
    registry.register(make_spec())
    assert reason_of(registry.start_inline, make_spec()) == ("REQUEST_EXISTS", {"request_id": "r"})


def test_the_number_of_remembered_ids_is_limited(registry, monkeypatch):
    monkeypatch.setattr(requests_module, "_REMEMBERED_IDS", 2)
    for name in "abca":
        registry.end(registry.start_inline(make_spec(name)))
    for name in "ca":
        registry.abort(name)
    assert reason_of(registry.abort, "b")[0] == "UNKNOWN_REQUEST"


def test_a_released_registration_can_be_started_again(registry, clock):
    registry.register(make_spec())
    running = registry.start_registered("r")
    clock.now += 2 * TIME_TO_LIVE
    registry.release(running)
    assert registry.running == ()
    clock.now += TIME_TO_LIVE - 1  # its time starts again
    assert registry.start_registered("r").spec == make_spec()


def test_a_released_inline_request_leaves_its_id_free(registry):
    registry.release(registry.start_inline(make_spec()))
    registry.start_inline(make_spec())


def test_a_request_that_was_aborted_before_it_began_has_ended(registry):
    registry.register(make_spec())
    running = registry.start_registered("r")
    registry.abort("r")
    registry.release(running)
    assert registry.running == ()
    assert reason_of(registry.start_registered, "r")[0] == "UNKNOWN_REQUEST"
    registry.abort("r")  # aborting an ended request is allowed


def test_abort_reaches_the_running_request(registry):
    running, other = registry.start_inline(make_spec("r")), registry.start_inline(make_spec("other"))
    registry.abort("r")
    assert running.aborted.is_set()
    assert not other.aborted.is_set()


def test_abort_calls_the_requests_callback(registry):
    running, told = registry.start_inline(make_spec("r")), []
    running.on_abort = lambda: told.append(running.aborted.is_set())
    registry.abort("r")
    assert told == [True]


def test_abort_drops_a_registration(registry):
    registry.register(make_spec())
    registry.abort("r")
    assert reason_of(registry.start_registered, "r")[0] == "UNKNOWN_REQUEST"
    assert reason_of(registry.abort, "r")[0] == "UNKNOWN_REQUEST"


def test_abort_of_an_ended_request_is_no_error(registry):
    registry.end(registry.start_inline(make_spec()))
    registry.abort("r")


def test_abort_of_the_unknown_is_refused(registry):
    assert reason_of(registry.abort, "nobody") == ("UNKNOWN_REQUEST", {"request_id": "nobody"})


def test_vectors_are_in_use_while_a_request_waits_or_runs(registry, clock):
    registry.register(make_spec("waits", b"a" * 32))
    running = registry.start_inline(make_spec("runs", b"b" * 32))
    registry.start_inline(make_spec("needs none"))
    assert leased(registry) == {"a", "b"}
    registry.end(running)
    assert leased(registry) == {"a"}
    clock.now += TIME_TO_LIVE
    assert leased(registry) == set()


def test_a_lease_ends_once_for_each_request_that_needs_the_vector(registry):
    for name in ("x", "y"):
        registry.register(make_spec(name, b"a" * 32))
    registry.register(make_spec("x", b"a" * 32))  # renewed: still one lease
    registry.abort("x")
    assert leased(registry) == {"a"}
    running = registry.start_registered("y")
    registry.release(running)  # registered again
    assert leased(registry) == {"a"}
    registry.end(registry.start_registered("y"))
    assert leased(registry) == set()


def test_a_registration_that_alone_takes_too_much_memory_never_passes(clock):
    spec = make_spec("a", b"d" * 32)
    registry = RequestRegistry(TIME_TO_LIVE, max_registrations=100, clock=clock, max_bytes=spec.num_bytes - 1)
    sizes = {"needed": str(spec.num_bytes), "allowed": str(spec.num_bytes - 1)}
    assert reason_of(registry.register, spec) == ("LIMIT_REACHED", {"limit": "max_registration_mib", **sizes})


def leased(registry):
    return {name for name in "abc" if registry.is_leased(name.encode() * 32)}


def test_the_memory_of_registrations_is_limited(clock):
    registry = RequestRegistry(TIME_TO_LIVE, max_registrations=100, clock=clock, max_bytes=100)
    size = make_spec("a", b"d" * 32).num_bytes
    assert 33 < size <= 50
    for name in "ab":
        registry.register(make_spec(name, b"d" * 32))
    registry.register(make_spec("a", b"d" * 32))  # needs no more room than before
    full = ("LIMIT_REACHED", {"limit": "max_registration_mib"})
    assert reason_of(registry.register, make_spec("c", b"d" * 32)) == full
    registry.start_registered("a")
    registry.register(make_spec("c", b"d" * 32))
    clock.now += TIME_TO_LIVE
    for name in "de":
        registry.register(make_spec(name, b"d" * 32))
