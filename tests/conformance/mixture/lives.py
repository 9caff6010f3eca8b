"""Sends the requests of a round at their times, and reads, changes, aborts or leaves each as it says."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import residuum
from tests.conformance.mixture.cases import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conformance.mixture.cases import Case
    from tests.conformance.mixture.operations import Placed
    from tests.conformance.mixture.world import World

_SECONDS = 240.0
"""The longest that a request may take on a busy machine."""


async def live_all(client: residuum.AsyncClient, cases: Sequence[Case], world: World) -> dict[int, Outcome]:
    """Let all requests live, and return what became of them, by their numbers."""
    outcomes = {case.number: Outcome() for case in cases}
    await asyncio.gather(*(_live(client, case, outcomes, world) for case in cases))
    return outcomes


async def _live(client: residuum.AsyncClient, case: Case, outcomes: dict[int, Outcome], world: World) -> None:
    await asyncio.sleep(case.delay)
    outcome = outcomes[case.number]
    given = _prompt_of(case, outcomes, world)
    outcome.prompt = given[: case.sampling.get("truncate_prompt")]
    following = None
    try:
        stream = await _started(client, case, given)
        async with stream:
            if case.follows:
                following = asyncio.create_task(_follow(client, case, outcome))
            await _read(client, stream, case, outcome)
            if case.life != "leave":
                with suppress(residuum.ResiduumError):
                    outcome.reply = stream.reply
    except residuum.ResiduumError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if following is not None:
        await following


async def _started(client: residuum.AsyncClient, case: Case, prompt: list[int]) -> residuum.AsyncStream:
    spec: dict[str, Any] = {
        "capture": case.capture.given if case.capture else None,
        "steer": [item.given for item in case.steer],
        "request_id": case.name,
        "model": case.adapter,
        "updatable": case.updatable,
        "probes": case.probes,
        "score_prompt": case.score_prompt,
        "rules": [rule.given for rule in case.rules],
    }
    if case.start == "registered":
        registration = await client.register(**spec)
        return client.stream(prompt, registration=registration, timeout=_SECONDS, **case.sampling)
    if case.start == "replaces":
        spec["if_exists"] = "replace"
        other = residuum.Capture(layers="all", labels={"of": "the request before"})
        before = client.stream(prompt[::-1], request_id=case.name, capture=other, max_tokens=40, ignore_eos=True)
        async with before:
            for _ in range(case.ends_after % 4):
                await anext(before, None)
        await _until_it_has_ended(client, case.name)
    return client.stream(prompt, timeout=_SECONDS, **spec, **case.sampling)


async def _until_it_has_ended(client: residuum.AsyncClient, name: str) -> None:
    """Wait until a request that was left has freed its ID."""
    with suppress(residuum.UnknownCapture):
        await client.manifest(name, wait=60)


def _prompt_of(case: Case, outcomes: dict[int, Outcome], world: World) -> list[int]:
    """Return the prompt. It may continue what another request has generated until now, which is in the prefix cache."""
    if case.after is None or not outcomes.get(case.after, Outcome()).prompt:
        return list(case.prompt)
    other = outcomes[case.after]
    room = world.longest - int(case.sampling["max_tokens"]) - 1
    return [*other.prompt, *other.streamed.get(0, []), *case.prompt[:5]][:room]


async def _read(client: residuum.AsyncClient, stream: residuum.AsyncStream, case: Case, outcome: Outcome) -> None:
    updates = sorted(case.updates, key=lambda item: item[0])
    aborted = False
    while True:
        count = max(map(len, outcome.streamed.values()), default=0)
        if case.life == "leave" and count >= case.ends_after:
            return
        if case.life == "abort" and count >= case.ends_after and not aborted:
            aborted = True
            await client.abort(case.name)
        while updates and count >= updates[0][0]:
            await _update(stream, updates.pop(0)[1], outcome)
        delta = await anext(stream, None)
        if delta is None:
            return
        outcome.streamed.setdefault(delta.sequence, []).extend(delta.token_ids)


async def _update(stream: residuum.AsyncStream, operations: list[Placed], outcome: Outcome) -> None:
    try:
        firsts = await stream.update_steering([item.given for item in operations])
    except residuum.ResiduumError as error:  # the request may have ended
        outcome.refused_changes.append(f"{type(error).__name__}: {error}")
    else:
        outcome.changes.append((tuple(firsts), operations))


async def _follow(client: residuum.AsyncClient, case: Case, outcome: Outcome) -> None:
    try:
        outcome.followed.extend(
            [piece async for piece in client.follow(case.name, sequence=case.sequences - 1, timeout=_SECONDS)]
        )
    except residuum.ResiduumError as error:
        outcome.follow_error = type(error).__name__
