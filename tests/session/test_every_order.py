"""No capture is silently partial: for every order of events, at both entry points, it is sealed once and correctly."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from residuum.v1 import capture_pb2
from tests.inference.service_support import DEADLINE
from tests.session.faces import DEAD, FACES, ScriptedStore

COMPLETE, INCOMPLETE, ABORTED = (
    capture_pb2.CAPTURE_STATE_COMPLETE,
    capture_pb2.CAPTURE_STATE_INCOMPLETE,
    capture_pb2.CAPTURE_STATE_ABORTED,
)
OPENINGS = [
    *("ok", "ok", "later, ok", "refused", "no answer", "queued, ok", "queued, refused", "queued, no answer"),
    *("early, ok", "early, refused", "early, no answer"),
]
_TURNS = 60
"""Turns of the event loop after which it is idle."""


class EveryOrder(RuleBasedStateMachine):
    """One request. The expected seal follows from the first event that ends it.

    While the store takes rows but has not opened the capture, the engine generates, and the caller gets nothing. If the
    store takes rows early, it is asked to open the capture when the burst of requests is over, when the engine has
    generated anything, or when the request ends.
    """

    face_name: str
    given_up = False
    """Whether vLLM gave up a sequence, which it reports without an exception."""

    @initialize(num_sequences=st.integers(1, 3), opening=st.sampled_from(OPENINGS))
    def start(self, num_sequences, opening):
        self.loop = asyncio.new_event_loop()
        self.made = [[] for _ in range(num_sequences)]
        self.finished = [False] * num_sequences
        self.expected = {"refused": None, "no answer": ABORTED}.get(opening)
        self.reason = capture_pb2.INCOMPLETE_REASON_UNSPECIFIED
        self.has_ended = opening in ("refused", "no answer")
        self.is_open = opening == "ok"
        self.is_queued = opening.startswith(("queued", "early"))
        self.holds_burst = opening.startswith("early")
        self.waiting_end = None
        """What will end the request as soon as the store has opened the capture."""
        self.next_token = 1

        async def begin():
            self.store = ScriptedStore(opening)
            self.face = FACES[self.face_name](self.store, num_sequences)
            if not self.holds_burst:
                self.face.burst.end()
            self.face.start()

        self.loop.run_until_complete(begin())
        self.settle()

    @property
    def generates(self):
        return (self.is_open or self.is_queued) and not self.has_ended and self.waiting_end is None

    def settle(self):
        async def turn():
            for _ in range(_TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())

    def end(self, expected, reason=capture_pb2.INCOMPLETE_REASON_UNSPECIFIED):
        if not self.has_ended:
            self.has_ended, self.expected, self.reason = True, expected, reason
        self.settle()

    def end_when_open(self, *how):
        if self.is_open:
            self.end(*how)
        else:
            self.waiting_end = how
            self.settle()

    def tell(self, index, item):
        self.loop.call_soon(self.face.scripts[index].put_nowait, item)

    @precondition(lambda self: self.generates)
    @rule(index=st.integers(0, 2), count=st.integers(1, 3), finish=st.sampled_from([None, None, "stop", "length"]))
    def generate(self, index, count, finish):
        index %= len(self.made)
        if self.finished[index]:
            return
        token_ids = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        self.made[index] += token_ids
        self.finished[index] = finish is not None
        self.tell(index, (token_ids, finish))
        if all(self.finished):
            failed = (INCOMPLETE, capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED)
            self.end_when_open(*(failed if self.given_up else (COMPLETE,)))
        self.settle()

    @precondition(lambda self: self.generates)
    @rule(index=st.integers(0, 2), how=st.sampled_from(["error", "dead", "given up"]))
    def engine_fails(self, index, how):
        index %= len(self.made)
        if self.finished[index]:
            return
        self.tell(index, {"error": RuntimeError("scripted"), "dead": DEAD, "given up": ([], "error")}[how])
        died, failed = capture_pb2.INCOMPLETE_REASON_ENGINE_DIED, capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED
        if how == "given up" and self.face_name == "openai":
            self.given_up = self.finished[index] = True  # the other sequences go on
            if all(self.finished):
                self.end_when_open(INCOMPLETE, failed)
            self.settle()
            return
        self.end_when_open(INCOMPLETE, died if how == "dead" else failed)

    @precondition(lambda self: not self.has_ended and not self.waiting_end)
    @rule()
    def abort(self):
        self.loop.call_soon(self.face.abort)
        if self.is_queued and not self.is_open and self.face_name == "grpc":
            self.end_when_open(ABORTED)  # the call's own failure comes first if the store refuses
        else:
            self.leave_early()

    @precondition(lambda self: not self.has_ended)
    @rule()
    def client_leaves(self):
        self.loop.call_soon(self.face.consumer.cancel)
        self.leave_early()

    def leave_early(self):
        if self.given_up and self.is_open:
            self.end(INCOMPLETE, capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED)
        else:
            self.end(ABORTED)

    @rule()
    def time_passes(self):
        self.settle()

    @precondition(lambda self: self.holds_burst and not self.has_ended)
    @rule()
    def burst_ends(self):
        self.holds_burst = False
        self.loop.call_soon(self.face.burst.end)
        self.settle()
        assert self.store.opened

    @precondition(lambda self: ", " in self.store.opening and self.store.opened and not self.store.answers.is_set())
    @rule()
    def store_answers(self):
        self.loop.call_soon(self.store.answers.set)
        if self.store.opening.endswith("refused"):
            self.end(None)
        elif self.store.opening.endswith("no answer"):
            self.end(INCOMPLETE, capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED)
        else:
            self.is_open = True
            if self.waiting_end is not None:
                self.end(*self.waiting_end)
        self.settle()

    @precondition(lambda self: self.face_name == "grpc")
    @rule()
    def update_steering(self):
        async def update():
            self.face.update()

        self.loop.run_until_complete(update())
        self.settle()

    @invariant()
    def nothing_is_promised_too_early(self):
        if not hasattr(self, "store"):
            return
        assert len(self.store.opened) <= 1
        assert self.store.opened or (self.holds_burst and not any(self.made))
        assert len(self.store.seals) <= 1
        if not self.is_open:
            assert not any(self.face.handed_on)
        for seal in self.store.seals:
            if seal.outcome == COMPLETE:
                assert all(self.finished)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        try:
            self.finish()
        finally:
            self.loop.close()

    def finish(self):
        if self.holds_burst and not self.store.opened:
            self.burst_ends()
        if ", " in self.store.opening and not self.store.answers.is_set():
            self.store_answers()
        if not self.has_ended:
            self.client_leaves()
        self.settle()
        assert self.face.consumer.done()
        self.check_seal()
        assert self.face.is_clean()
        self.loop.run_until_complete(self.completed())
        assert self.face.burst.num_ended == len(self.store.seals), "the requests that follow go first"
        updates = self.face.updates
        assert all(update.done() for update in updates)
        done = [update for update in updates if update.exception() is None]
        if self.store.seals:
            assert len(self.store.seals[0].steering_changes) == len(done)

    async def completed(self):
        """Wait until all seals are complete: another thread decodes the tokens of the prompt."""
        await asyncio.wait_for(asyncio.gather(*self.store.completed), DEADLINE)

    def check_seal(self):
        if self.expected is None:
            assert not self.store.seals
            return
        (seal,) = self.store.seals
        assert seal.outcome == self.expected
        assert seal.incomplete_reason == self.reason
        assert bool(seal.incomplete_detail) == (seal.outcome == INCOMPLETE)
        for sealed, made, handed_on in zip(seal.sequences, self.made, self.face.handed_on, strict=True):
            token_ids = list(sealed.generated_token_ids)
            assert token_ids == made[: len(token_ids)]
            assert token_ids[: len(handed_on)] == handed_on
            if seal.outcome == COMPLETE:
                assert token_ids == made


def machine_of(name):
    return type(f"EveryOrder_{name}", (EveryOrder,), {"face_name": name})


@pytest.mark.parametrize("name", FACES)
def test_every_capture_is_sealed_once_with_the_right_outcome(name):
    machine = machine_of(name).TestCase
    machine.settings = settings(
        max_examples=150, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    machine("runTest").runTest()
