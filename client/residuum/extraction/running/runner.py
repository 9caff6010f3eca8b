"""Runs a job: sends the prompts, reads their rows, and writes shards in the order of the prompts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from residuum.exceptions import (
    DamagedCapture,
    ExtractStopped,
    IncompleteCapture,
    OutageWarning,
    ResiduumError,
    UnknownCapture,
)
from residuum.extraction.inputs.packing import PackedItems
from residuum.extraction.inputs.prompts import Items
from residuum.extraction.progress import Report, Totals
from residuum.extraction.running.prompt_sender import Answered, Failed, PromptSender, with_advice
from residuum.extraction.running.service import Service
from residuum.extraction.running.services import goes_away
from residuum.extraction.running.store_watch import watch_stores
from residuum.extraction.shards import SHARD_PROMPTS, Shard, ShardInfo
from residuum.extraction.spec import JobSpec, OnError
from residuum.protocol.caller import warn_caller
from residuum.protocol.captures.reading import not_complete, plan_read
from residuum.values.captures.activations import Activations

_READ_BYTES = 64 << 20
"""The approximate bytes of rows that one read brings."""
_READ_CAPTURES = 128
"""The most captures that one read brings."""
_AHEAD = 4
"""How many prompts may wait to be read for each that runs. They wait for one that is slower."""
_UNREAD_SHARDS = 2
"""How many files the captures of these prompts may fill, so that the stores need room for few."""
_WRITES = 2
"""How many files are written at once: while the disk syncs one, the next is copied to it."""
_LOST_ATTEMPTS = 3
"""How often a prompt is sent whose capture was lost or is not complete."""
_DELETING_SECONDS = 5.0
"""How long a job that stops waits for captures to be deleted. The end of the next run deletes the others."""
_CANCEL_SECONDS = 0.5
"""The time between two cancellations of the same task."""

Outcome = Answered | Failed


class ShardOutput(Protocol):
    """Where the shards go: the folder of a job, or a block of Ray Data."""

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """The shards of earlier runs."""
        ...

    @property
    def done(self) -> int:
        """The number of prompts in these shards."""
        ...

    def prepare(self, shard: Shard) -> None:
        """Do the work that does not depend on earlier shards. It runs in a thread, for several shards at once."""
        ...

    def discard(self, shard: Shard) -> None:
        """Undo `prepare`: a shard before it could not be written."""
        ...

    def commit(self, shard: Shard, total: int) -> object:
        """Take a shard of a job of `total` prompts, in order. It runs in a thread.

        When it returns, the captures are deleted.
        """
        ...


class Runner:
    """The rest of a job, from the first prompt that is in no shard."""

    def __init__(
        self,
        spec: JobSpec,
        items: Items | PackedItems,
        output: ShardOutput,
        sender: PromptSender,
        report: Report,
        *,
        max_concurrency: int,
        on_error: OnError,
        keep_captures: bool,
    ) -> None:
        self._spec = spec
        self._items = items
        self._output = output
        self._sender = sender
        self._report = report
        self._on_error = on_error
        self._keep = keep_captures
        self._waiting: deque[asyncio.Task[Outcome]] = deque()
        self._started = asyncio.Event()
        self._max_concurrency = max_concurrency
        self._unread = 0
        self._was_read = asyncio.Event()
        self._capture_bytes = _READ_BYTES // 8  # until the first capture is known
        self._used: list[tuple[Service, str]] = []
        self._writing: deque[asyncio.Task[None]] = deque()
        self._deleting: set[asyncio.Task[None]] = set()
        self.totals = Totals()
        """What this run has done."""

    async def run(self) -> None:
        """Run until all prompts are in shards.

        Raises:
            ExtractStopped: A prompt failed, and the job is to stop then.
            ResiduumError: All prompts would fail, or no service answers for too long.
            OSError: A shard cannot be written.
        """
        feeding = asyncio.ensure_future(self._feed())
        watching = asyncio.ensure_future(watch_stores(self._sender.services.all, lambda: self.totals.prompts))
        try:
            await self._collect(feeding)
            await asyncio.gather(*self._deleting)
        finally:
            await _cancel([feeding, watching, *self._waiting])
            # A thread cannot be cancelled; the shards that are being written become whole.
            await asyncio.gather(*self._writing, return_exceptions=True)
            if self._deleting:  # also of the captures of that shard
                _, late = await asyncio.wait(self._deleting, timeout=_DELETING_SECONDS)
                await _cancel(late)

    async def _feed(self) -> None:
        """Start the prompts in order, as there is room."""
        for index in range(self._output.done, len(self._items)):
            while self._unread >= self._most_unread():
                self._was_read.clear()
                await self._was_read.wait()
            self._unread += 1
            item = self._items.item(index)
            self._waiting.append(asyncio.ensure_future(self._sender.send(item)))
            self._started.set()

    def _most_unread(self) -> int:
        """Return how many prompts may run, or wait until their rows are read. Captures are read in order."""
        fit = _UNREAD_SHARDS * self._spec.shard_bytes // self._capture_bytes
        return max(self._max_concurrency, min(self._max_concurrency * (1 + _AHEAD), fit))

    async def _collect(self, feeding: asyncio.Task[None]) -> None:
        """Bring the rows of prompts into shards, in the order of the prompts."""
        shard = self._new_shard()
        total = len(self._items)
        while shard.first_prompt + shard.prompts < total:
            ended = await self._next(feeding)
            found = await self._read_captures(ended)
            for outcome in ended:  # one at a time: those before one that is sent again may make room for it
                self._add(shard, *await self._with_rows(outcome, found))
                if shard.bytes >= self._spec.shard_bytes or shard.prompts >= SHARD_PROMPTS:
                    shard = await self._finish(shard, total)
            self._report(self.totals)
        if shard.prompts:
            await self._finish(shard, total)
        await self._written(0)

    async def _next(self, feeding: asyncio.Task[None]) -> list[Outcome]:
        """Wait for the next prompt, and return it with those after it that have ended, too."""
        while not self._waiting:
            if feeding.done():
                feeding.result()
            self._started.clear()
            started = asyncio.ensure_future(self._started.wait())
            try:
                await asyncio.wait([started, feeding], return_when=asyncio.FIRST_COMPLETED)
            finally:  # a job that is cancelled here must not leave a task that never ends
                started.cancel()
        await asyncio.wait([self._waiting[0]])
        limit = max(1, min(_READ_CAPTURES, _READ_BYTES // self._capture_bytes))
        ended = list(itertools.takewhile(asyncio.Task.done, itertools.islice(self._waiting, limit)))
        for _ in ended:
            self._waiting.popleft()
        failures = [failure for task in ended if (failure := task.exception()) is not None]
        if failures:
            raise failures[0]
        return [task.result() for task in ended]

    async def _with_rows(
        self, outcome: Outcome, found: Mapping[str, Activations]
    ) -> tuple[Outcome, Activations | None]:
        """Return a prompt with its rows. One whose capture was lost is sent again."""
        if isinstance(outcome, Failed):
            return outcome, None
        acts = found.get(outcome.reply.request_id)
        if acts is not None and acts.manifest.state == "complete":
            return outcome, acts
        return await self._read_again(outcome, acts)

    async def _read_captures(self, outcomes: Iterable[Outcome]) -> dict[str, Activations]:
        """Return the captures that the stores have undamaged, by name. They may be incomplete."""
        by_service: dict[Service, list[str]] = {}
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                continue
            by_service.setdefault(outcome.service, []).append(outcome.reply.request_id)
        found: dict[str, Activations] = {}
        for service, names in by_service.items():
            try:
                captures = await self._activations(service, names)
            except (UnknownCapture, DamagedCapture):
                captures = [acts for name in names for acts in await self._activations_if_known(service, name)]
            except ResiduumError as failure:
                if not goes_away(failure):
                    raise
                self._sender.note_lost(service, failure)  # another service may compute the rows again
                continue
            found.update({acts.manifest.capture_id: acts for acts in captures})
        return found

    async def _activations(self, service: Service, names: Sequence[str]) -> list[Activations]:
        plan = plan_read(
            names[0], layers=None, sites=None, sequences=None, positions=None, follow=True, allow_partial=True
        )
        return await service.client._activations_of(  # noqa: SLF001 - `activations` warns of each empty capture
            names, plan, None, progress=False
        )

    async def _activations_if_known(self, service: Service, name: str) -> list[Activations]:
        try:
            return await self._activations(service, [name])
        except (UnknownCapture, DamagedCapture):
            return []

    async def _read_again(self, outcome: Answered, acts: Activations | None) -> tuple[Outcome, Activations | None]:
        for attempt in range(outcome.attempt + 1, outcome.attempt + _LOST_ATTEMPTS):
            again = await self._sender.send(outcome.item, attempt)
            if isinstance(again, Failed):
                return again, None
            acts = (await self._read_captures([again])).get(again.reply.request_id)
            if acts is not None and acts.manifest.state == "complete":
                return again, acts
        if acts is not None and acts.manifest.reason == "STORE_FULL":  # other prompts would lose their rows, too
            raise with_advice(not_complete(acts.manifest))
        why = (
            "it was deleted, has expired or is damaged"
            if acts is None
            else f"{acts.manifest.reason}: {acts.manifest.detail}"
        )
        message = f"Its capture was not complete in {_LOST_ATTEMPTS} attempts ({why})."
        error = (
            ResiduumError(message, reason="INCOMPLETE") if acts is None else IncompleteCapture(message, acts.manifest)
        )
        return Failed(outcome.item, error), None

    def _add(self, shard: Shard, outcome: Outcome, acts: Activations | None) -> None:
        before = shard.bytes
        self._unread -= 1
        self._was_read.set()
        self.totals.prompts += 1
        self.totals.left_out += len(outcome.item.left_out)
        if isinstance(outcome, Failed) or acts is None:
            self._add_failure(shard, outcome)
            return
        shard.add(outcome.item, acts, outcome.reply)
        self._used.append((outcome.service, outcome.reply.request_id))
        lately = self._capture_bytes * 3 // 4 if self.totals.bytes else 0
        self._capture_bytes = max(1, shard.bytes - before, lately)
        self.totals.bytes += shard.bytes - before
        self.totals.rows += sum(len(acts.select(sequence=sequence).positions) for sequence in acts.sequences)
        self.totals.tokens += len(outcome.reply.prompt_token_ids) + outcome.reply.usage.generated_tokens

    def _add_failure(self, shard: Shard, outcome: Outcome) -> None:
        if not isinstance(outcome, Failed):
            raise TypeError(f"{outcome.item.where} has no rows")
        is_skipped = self._spec.on_long == "skip" and outcome.reason == "PROMPT_TOO_LONG"
        if self._on_error == "stop" and not is_skipped:
            raise ExtractStopped(outcome.item.where, outcome.error, self._output.done, len(self._items))
        self.totals.failed += 1
        shard.add_failure(outcome.item, outcome.reason, str(outcome.error))

    def _new_shard(self, after: Shard | None = None) -> Shard:
        number = len(self._output.shards) if after is None else after.number + 1
        first = self._output.done if after is None else after.first_prompt + after.prompts
        before = [shard.tensors for shard in self._output.shards] if after is None else [after.kinds]
        kinds = {name: kind for tensors in before for name, kind in tensors.items()}
        return Shard(number, first, as_float32=self._spec.dtype == "float32", kinds=kinds)

    async def _finish(self, shard: Shard, total: int) -> Shard:
        """Begin to write a shard, and return the next one. It waits while others are written."""
        for earlier in self._writing:
            if earlier.done():
                earlier.result()  # raises if it failed, before more is written
        await self._written(_WRITES - 1)
        used, self._used = self._used, []
        before = self._writing[-1] if self._writing else None
        self._writing.append(asyncio.ensure_future(self._write(shard, total, used, before)))
        return self._new_shard(after=shard)

    async def _written(self, left: int) -> None:
        """Wait until at most `left` shards are still being written."""
        while len(self._writing) > left:
            await asyncio.shield(self._writing[0])  # a cancelled job waits for the threads in `run`
            self._writing.popleft()

    async def _write(
        self, shard: Shard, total: int, used: list[tuple[Service, str]], before: asyncio.Task[None] | None
    ) -> None:
        await asyncio.to_thread(self._output.prepare, shard)
        if before is not None:
            try:
                await asyncio.shield(before)
            except BaseException:  # also if this is cancelled
                self._output.discard(shard)
                raise
        await asyncio.to_thread(self._output.commit, shard, total)
        if not self._keep:
            task = asyncio.ensure_future(_delete(used))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended. A call of grpc.aio that just begins may lose a cancellation."""
    tasks = list(tasks)
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_CANCEL_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _delete(used: Iterable[tuple[Service, str]]) -> None:
    """Delete captures. What cannot be deleted now, the end of the job deletes."""
    by_service: dict[Service, list[str]] = {}
    for service, name in used:
        by_service.setdefault(service, []).append(name)
    for service, names in by_service.items():
        with contextlib.suppress(ResiduumError):
            await service.client.delete(names)


async def clean_up(services: Iterable[Service], job_id: str, *, keep_captures: bool) -> None:
    """Delete the job's captures, or with `keep_captures` only those of attempts that broke off."""
    states = ["incomplete", "aborted"] if keep_captures else []
    for service in services:
        try:
            await service.client.delete(prefix=f"{job_id}-", states=states)
        except ResiduumError as failure:
            warn_caller(
                f"Captures of the job may be left in the stores of {service.client.endpoint}: {failure} Delete them "
                f"with `residuum rm --prefix {job_id}-`.",
                OutageWarning,
            )
