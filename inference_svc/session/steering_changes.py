"""Changes the steering of a request while it generates: for `UpdateSteering`, or for a rule that fired in one sequence.

A change reaches every worker by one `collective_rpc`, between two steps. Each worker keeps, for each
request, which operations apply from which position (`RequestState` in taps/steps/layout.py):

    position    0 ------------ 5 ----- 9 ----->        changed at 5 and at 9; the next position is 12
    operations  first          second  third

* A change applies from the first position that is not computed yet. Only the worker knows that position. Its answer
  goes to the client and into the manifest, for each sequence.
* vLLM's executor gives the change and the steps to all ranks in the same order. So the change comes after the same step
  on every rank, also if one pipeline stage is a step ahead of another. `Engine.change_steering` checks that the ranks
  answer with the same position.
* A position that is computed again after a preemption gets the operations that it had the first time, because captured
  rows and later rows depend on them. So a request keeps the bank rows of all vectors that it has used. A request that
  was never changed pays one comparison per step.
* A change may reach a worker before its request does. The worker keeps the change under the request's name until the
  request is scheduled, or until it is told to forget it. It remembers the names of ended requests. With data
  parallelism, the change reaches every replica, and those without the request keep it until the request ends.
* Changes of one request are sent one after the other. But a rule overtakes a change that waits for room among the
  active vectors: the rule's vectors are active, and the sequence goes on meanwhile. A change whose caller leaves before
  it is sent is not sent; once it is sent, it is recorded whatever happens to the caller or the request.
* The end of a request waits up to 5 s for the engine's answer to a change. If a step takes longer, it waits for the
  store, and the change applies after everything that is computed for the request.
* All operations that a request has had must fit the taps' tables and the manifest together, because a step that
  computes the request again may need all of them. Otherwise the change is refused (LIMIT_REACHED). Admission checks
  that there is room for all rules; only a request that `UpdateSteering` changes as well may run out of it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_svc.admission.rules import with_rules
from inference_svc.admission.steering import demand_of_steering, digests_of
from inference_svc.requests.plans import engine_id, make_operations
from inference_svc.session.interruption import unless_interrupted
from inference_svc.taps.steps.demand import MAX_ENTRIES
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import steering_pb2
from residuum.wire.limits import MAX_STEERING_CHANGES, MAX_STEERING_CHANGES_BYTES
from residuum.wire.probes.rules import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from inference_svc.engine.engine import Engine
    from inference_svc.requests.registry import Running
    from inference_svc.resources.vector_activator import VectorHold
    from inference_svc.session.sequences import GeneratedSequence
    from residuum.v1 import rule_pb2

_ANSWER_SECONDS = 5.0
"""How long the end of a request waits for the engine's answer to a change. The engine answers between two steps, and a
step may wait for as long as the store is unreachable."""


@dataclass(frozen=True)
class _Change:
    """One change, as the engine applied it."""

    steering: steering_pb2.SteeringSpec
    firsts: Sequence[int | None]
    """For each sequence, the first position that the change applies to; None if the sequence had already ended."""
    rule: str = ""
    """The rule that made it."""


class SteeringChanges:
    """Changes the steering of one request, for as long as the asynchronous context lasts, and records the changes."""

    def __init__(
        self,
        engine: Engine,
        running: Running,
        prompt_tokens: int,
        vectors: VectorHold,
        sequences: Sequence[GeneratedSequence],
    ) -> None:
        """Prepare to change a request.

        Args:
            engine: The engine that runs the request.
            running: The request.
            prompt_tokens: The number of tokens in its prompt.
            vectors: The vectors that it holds.
            sequences: The record of each of its sequences.
        """
        self._engine = engine
        self._running = running
        self._prompt_tokens = prompt_tokens
        self._vectors = vectors
        self._sequences = sequences
        self._steering: list[steering_pb2.SteeringSpec | None] = [running.spec.steering] * len(sequences)
        """The current steering of each sequence."""
        self._entries: list[dict[bytes, int]] = []
        """For each sequence, how many entries of the taps' tables each steering spec takes, by its serialized bytes.
        Empty until the first change."""
        self._changes: list[_Change] = []
        self._turn = asyncio.Lock()
        """Held by the change of a caller, also while it waits for room among the active vectors."""
        self._lock = asyncio.Lock()
        """Held from the check of a change until the change is recorded."""
        self._closed = asyncio.Event()
        """Set when the request ends: later changes are refused."""
        self._answer_timed_out = asyncio.Event()
        """Set when the end of the request stops waiting for the engine's answer."""
        self._workers_remember = False
        """Whether the workers may have stored a change for a sequence that has not reached them yet."""

    def changes(self) -> list[steering_pb2.SteeringChange]:
        """Return the changes in order."""
        return [
            steering_pb2.SteeringChange(
                steering=change.steering, first_positions=self._first_positions(change.firsts), rule=change.rule
            )
            for change in self._changes
        ]

    async def change(self, steering: steering_pb2.SteeringSpec) -> list[int]:
        """Replace the steering of all sequences, starting with the next step of the engine.

        Returns:
            For each sequence, the first position that the new steering applies to.

        Raises:
            Failure: There is no room for the change, or the request is ending.
        """
        indices = range(len(self._sequences))
        async with self._turn:
            self._check(steering, indices)
            added = self._vectors.add(digests_of(steering))
            await unless_interrupted(self._closed, self._running.ended_failure, added)
            await self._lock.acquire()
            try:
                self._check(steering, indices)  # a rule may have fired meanwhile
            except BaseException:
                self._lock.release()
                raise
            firsts = await self._applied(steering, indices)
        for sequence, first in zip(self._sequences, firsts, strict=True):
            if first is None:
                await sequence.has_ended.wait()  # its last tokens may still be on their way here
        return self._first_positions(firsts)

    async def add(self, index: int, rule: rule_pb2.Rule) -> int | None:
        """Add the operations of a rule to the steering of one sequence, starting with the next step of the engine.

        The request holds their vectors since its start.

        Returns:
            The first position that they apply to; None if the sequence had already ended in the engine.

        Raises:
            Failure: There is no room for the change, or the request is ending.
        """
        await self._lock.acquire()
        try:
            steering = with_rules(self._steering[index], rule.steering.operations)
            self._check(steering, [index], rule.name)
        except BaseException:
            self._lock.release()
            raise
        return (await self._applied(steering, [index], rule.name))[index]

    async def _applied(
        self, steering: steering_pb2.SteeringSpec, indices: Sequence[int], rule: str = ""
    ) -> list[int | None]:
        """Apply a checked change, and release the lock. See `_apply`."""
        # A separate task, because the caller may disconnect, but a change that reached the engine must be recorded.
        applying = asyncio.create_task(self._apply(steering, indices, rule))
        applying.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(applying)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Refuse further changes, and wait until the last change is recorded."""
        self._closed.set()
        for sequence in self._sequences:
            sequence.has_ended.set()
        if self._turn.locked() or self._lock.locked():
            timer = asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._answer_timed_out.set)
            async with self._turn, self._lock:
                timer.cancel()
        if self._workers_remember:
            await self._forget()

    async def _apply(self, steering: steering_pb2.SteeringSpec, indices: Sequence[int], rule: str) -> list[int | None]:
        """Make the engine change the steering of some sequences, and record the change.

        Returns:
            For each sequence, the first position that the change applies to: None if the sequence had already ended,
            and `NEVER` if the change is not for this sequence.

        Raises:
            Failure: The engine is dead. Or the request has ended and the engine did not answer in time. In that case
                the change has no effect, because the engine computes nothing more for the request.
        """
        operations = make_operations(steering, self._vectors.rows)
        names = [self._name(index) for index in indices if not self._sequences[index].has_ended.is_set()]
        answers: dict[str, int | None] = {}
        if names:
            self._workers_remember, remembered = True, self._workers_remember
            call = self._engine.change_steering(dict.fromkeys(names, operations))
            answers = await unless_interrupted(self._answer_timed_out, self._running.ended_failure, call)
            # Only one replica has the request. The others keep the change as if the request were still to come.
            self._workers_remember = remembered or 0 in answers.values() or self._engine.facts.data_parallel_size > 1
        firsts: list[int | None] = [NEVER] * len(self._sequences)
        for index in indices:
            firsts[index] = answers.get(self._name(index))
            self._steering[index] = steering
            self._entries[index][_key_of(steering)] = self._entries_of(steering)
        self._changes.append(_Change(steering, firsts, rule))
        return firsts

    async def _forget(self) -> None:
        names = [self._name(index) for index in range(len(self._sequences))]
        with suppress(Failure, asyncio.TimeoutError):  # the engine has died, or it gets the message later
            await asyncio.wait_for(self._engine.forget(names), _ANSWER_SECONDS)

    def _check(self, steering: steering_pb2.SteeringSpec, indices: Sequence[int], rule: str = "") -> None:
        """Check that there is room for a change of some sequences.

        Raises:
            Failure: The request is ending, or was changed too often.
        """
        if self._closed.is_set():
            raise self._running.ended_failure()
        # The first positions are known only after the change. The largest possible ones give an upper bound.
        is_partial = len(indices) < len(self._sequences) or any(NEVER in change.firsts for change in self._changes)
        firsts = [NEVER if is_partial else self._engine.facts.max_model_len] * len(self._sequences)
        changes = [
            steering_pb2.SteeringChange(steering=item, first_positions=firsts, rule=name)
            for item, name in [*((change.steering, change.rule) for change in self._changes), (steering, rule)]
        ]
        size = sum(change.ByteSize() for change in changes)
        for needed, allowed in ((len(changes), MAX_STEERING_CHANGES), (size, MAX_STEERING_CHANGES_BYTES)):
            if needed > allowed:
                raise self._changed_too_often(
                    f"its manifest has room for at most {MAX_STEERING_CHANGES} changes of "
                    f"{MAX_STEERING_CHANGES_BYTES >> 10} KiB in total",
                    needed=needed,
                    allowed=allowed,
                )
        # After a preemption, one step may recompute positions of several steering specs, so all of them must fit the
        # tables' entries. The tables have a program for each row of a step, so the number of programs needs no check.
        start = self._running.spec.steering
        if not self._entries:
            known = {_key_of(start): self._entries_of(start)}
            self._entries = [dict(known) for _ in self._sequences]
        added = {_key_of(steering): self._entries_of(steering)}
        entries = max(sum({**self._entries[index], **added}.values()) for index in indices)
        if entries > MAX_ENTRIES:
            raise self._changed_too_often(
                f"its steering specs together would take {entries} entries of the taps' tables, more than its share of "
                f"{MAX_ENTRIES}",
                needed=entries,
                allowed=MAX_ENTRIES,
            )

    def _changed_too_often(self, limit: str, *, needed: int, allowed: int) -> Failure:
        """Return the failure of a change that can never pass, as a request's changes are never forgotten."""
        return Failure(
            Reason.ERROR_REASON_LIMIT_REACHED,
            f"The steering of {self._running.request_id!r} was changed {len(self._changes)} times, the limit: "
            f"{limit}. Send a new request.",
            limit="steering_changes",
            needed=needed,
            allowed=allowed,
        )

    def _entries_of(self, steering: steering_pb2.SteeringSpec | None) -> int:
        return demand_of_steering(steering, self._running.spec.capture, self._running.spec.probes).entries

    def _name(self, index: int) -> str:
        return engine_id(self._running.path, index)

    def _first_positions(self, firsts: Sequence[int | None]) -> list[int]:
        """Return a position for each sequence. For a sequence that had ended: the position after its last token."""
        return [
            first if first is not None else self._prompt_tokens + sequence.engine_tokens
            for sequence, first in zip(self._sequences, firsts, strict=True)
        ]


def _key_of(steering: steering_pb2.SteeringSpec | None) -> bytes:
    """Return a key that is the same only for the same operations."""
    return steering_pb2.SteeringSpec(operations=steering.operations if steering else ()).SerializeToString(
        deterministic=True
    )
