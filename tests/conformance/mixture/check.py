"""Checks one request after its end: its steering, its reply and its capture, against the reference."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

import residuum
from residuum.wire.probes.rules import NEVER
from tests.conformance.mixture.expected import Expected, Segments, expect
from tests.conformance.mixture.replies import check_reply, check_scores
from tests.conformance.mixture.rows import check_followed, check_presence, check_values, same

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.conformance.reference import Reference
    from residuum.values.captures.manifest_records import SteeringChange
    from tests.conformance.mixture.cases import Case, Outcome
    from tests.conformance.mixture.operations import Placed
    from tests.conformance.mixture.probing import RuleDrawn
    from tests.conformance.mixture.tally import Tally
    from tests.conformance.mixture.world import World


class Checker:
    """Checks the requests of one service."""

    def __init__(
        self,
        client: residuum.AsyncClient,
        blocking: residuum.Client,
        references: Mapping[str | None, Reference],
        world: World,
        folder: Path,
        tally: Tally,
    ) -> None:
        """Use two clients, and the reference of the model and of each adapter."""
        self._client = client
        self._blocking = blocking
        self._references = references
        self._world = world
        self._folder = folder
        self._tally = tally
        self._many: list[tuple[Case, residuum.Activations]] = []

    async def check(self, case: Case, outcome: Outcome) -> None:
        """Check a request."""
        tally, name = self._tally, case.name
        tally.counts["requests"] += 1
        tally.counts[f"requests that the client {_LIVES[case.life]}"] += 1
        tally.counts[f"starts: {case.start}"] += 1
        if not outcome.prompt:
            return
        if case.life == "read" and outcome.reply is None and not _is_rightly_refused(case, outcome):
            tally.fault(name, f"no reply: {outcome.error}")
        if outcome.error and not outcome.error.startswith("RequestAborted"):
            tally.counts[f"errors: {outcome.error[:120]}"] += 1
        manifest = await self._manifest(case, outcome) if case.capture else None
        if manifest is not None:
            tokens = [list(item.generated_token_ids) for item in manifest.sequences]
            segments = self._segments_of_manifest(case, outcome, manifest)
            self._check_manifest(case, outcome, manifest)
        elif outcome.reply is not None:
            tokens = [list(item.token_ids) for item in outcome.reply.sequences]
            segments = self._segments_of_reply(case, outcome)
        else:
            return
        if segments is None:
            return
        prompt = outcome.prompt
        expected = [
            expect(
                self._references[case.adapter], [*prompt, *of_sequence[:-1]], len(prompt), of, self._world.top_experts
            )
            for of_sequence, of in zip(tokens, segments, strict=True)
        ]
        tally.counts["sequences"] += len(expected)
        tally.counts["sequences with a tie"] += sum(known.decided < len(known.tokens) for known in expected)
        if outcome.reply is not None:
            check_reply(case, outcome, expected, tally)
        if manifest is not None:
            await self._check_capture(case, outcome, manifest, expected)

    async def finish(self) -> None:
        """Check the captures that are read together."""
        if not self._many:
            return
        names = [case.name for case, _ in self._many]
        found = await self._client.activations(names, allow_partial=True)
        for (case, acts), other in zip(self._many, found, strict=True):
            if not same(acts, other):
                self._tally.fault(case.name, "a read of many captures gives other rows")
        self._tally.counts["captures read together"] += len(names)
        self._many.clear()

    async def _manifest(self, case: Case, outcome: Outcome) -> residuum.Manifest | None:
        try:
            manifest = await self._client.manifest(case.name, wait=60)
        except residuum.UnknownCapture:
            if outcome.reply is not None:
                self._tally.fault(case.name, "the capture does not exist")
            return None
        states = {"complete"} if outcome.reply is not None else {"complete", "aborted"}
        if case.capture is not None and case.capture.given.overflow == "shed":
            states.add("incomplete")
        if manifest.state not in states:
            self._tally.fault(case.name, f"the capture is {manifest.state}: {manifest.reason} {manifest.detail}")
        if dict(manifest.labels) and not outcome.streamed:  # this one ended before it could replace the other
            self._tally.counts["captures that were not replaced yet"] += 1
            return None
        self._tally.counts[f"captures: {manifest.state}"] += 1
        if not manifest.sequences:
            self._tally.fault(case.name, f"the capture is {manifest.state} without sequences")
            return None
        return manifest

    def _check_manifest(self, case: Case, outcome: Outcome, manifest: residuum.Manifest) -> None:
        tally, name = self._tally, case.name
        if list(manifest.prompt_token_ids) != outcome.prompt:
            tally.fault(name, "the manifest has another prompt")
        for index, item in enumerate(manifest.sequences):
            streamed = outcome.streamed.get(index, [])
            generated = list(item.generated_token_ids)
            if (outcome.reply is not None and generated != streamed) or generated[: len(streamed)] != streamed:
                tally.fault(name, f"sequence {index}: the manifest and the stream have other tokens")
        if manifest.steering != tuple(item.record() for item in case.steer):
            tally.fault(name, f"the manifest has other steering: {manifest.steering}")
        if dict(manifest.labels):
            tally.fault(name, f"the manifest has the labels of another request: {manifest.labels}")
        if manifest.adapter != (case.adapter or ""):
            tally.fault(name, f"the manifest has the adapter {manifest.adapter!r}")
        if outcome.reply is not None and set(manifest.rule_events) != set(outcome.reply.events):
            tally.fault(name, "the manifest has other rule events")
        reported = [firsts for firsts, _ in outcome.changes]
        recorded = [item.first_positions for item in manifest.steering_changes if not item.rule]
        if [item for item in recorded if item in reported] != reported:
            tally.fault(name, f"changes at {reported} were reported, at {recorded} recorded")
        if not outcome.refused_changes and recorded != reported:
            tally.fault(name, f"changes at {recorded} were recorded, at {reported} reported")

    def _segments_of_manifest(self, case: Case, outcome: Outcome, manifest: residuum.Manifest) -> list[Segments] | None:
        """Return the steering of each sequence, from the manifest's changes."""
        segments: list[Segments] = [[(0, case.steer)] for _ in manifest.sequences]
        asked = [operations for _, operations in sorted(case.updates, key=lambda item: item[0])]
        for change in manifest.steering_changes:
            self._tally.counts[f"changes of steering by {'a rule' if change.rule else 'a client'}"] += 1
            operations: list[Placed] | None = None
            if not change.rule:
                operations = _take(asked, change)
                if operations is None:
                    self._tally.fault(case.name, f"nobody asked for the change at {change.first_positions}")
                    return None
            for index, first in enumerate(change.first_positions):
                if first != NEVER:
                    of_sequence = segments[index]
                    of_rule = [*of_sequence[-1][1], *_rule_of(case, change.rule)]
                    self._add(case, change, of_sequence, first, of_rule if operations is None else operations)
                    end = len(outcome.prompt) + len(manifest.sequences[index].generated_token_ids) - 1
                    self._tally.counts["changes of steering during a reply"] += first < end
        return segments

    def _add(
        self, case: Case, change: SteeringChange, segments: Segments, first: int, operations: list[Placed]
    ) -> None:
        if tuple(item.record() for item in operations) != change.steering:
            self._tally.fault(case.name, f"the rule {change.rule} made another change: {change.steering}")
        if first < segments[-1][0]:
            self._tally.fault(case.name, f"a change at {first} comes after one at {segments[-1][0]}")
        segments.append((first, operations))

    def _segments_of_reply(self, case: Case, outcome: Outcome) -> list[Segments] | None:
        """Return the steering of each sequence of a request without a capture."""
        assert outcome.reply is not None
        if outcome.refused_changes:  # they may have been applied, and nothing says where
            return None
        segments: list[Segments] = []
        for index in range(len(outcome.reply.sequences)):
            of_sequence: Segments = [(0, case.steer)]
            of_sequence += [(firsts[index], operations) for firsts, operations in outcome.changes]
            for event in outcome.reply.events:
                if event.sequence == index and event.first_position is not None:
                    of_sequence.append((event.first_position, [*of_sequence[-1][1], *_rule_of(case, event.rule)]))
            segments.append(of_sequence)
            self._tally.counts["changes of steering without a capture"] += len(of_sequence) - 1
        return segments

    async def _check_capture(
        self, case: Case, outcome: Outcome, manifest: residuum.Manifest, expected: list[Expected]
    ) -> None:
        asked, tally = case.capture, self._tally
        assert asked is not None
        check_presence(case, manifest, expected, tally)
        for index, known in enumerate(expected):
            self._check_kept_scores(case, outcome, manifest, index, known)
        if not manifest.present:
            return
        acts = await self._client.activations(case.name, allow_partial=True)
        check_values(case, acts, expected, self._world, tally)
        if case.follows:
            tally.counts["captures followed"] += 1
            if outcome.follow_error not in {"", "AbortedCapture"}:
                tally.fault(case.name, f"following ended with {outcome.follow_error}")
            if not outcome.follow_error:
                check_followed(case, outcome, acts, tally)
        await self._read_again(case, acts)

    def _check_kept_scores(
        self, case: Case, outcome: Outcome, manifest: residuum.Manifest, index: int, known: Expected
    ) -> None:
        kept = manifest.scores(index) if case.probes else None
        if not case.probes:
            return
        if kept is None:
            self._tally.fault(case.name, "the manifest has no scores")
            return
        if outcome.reply is not None:
            given = outcome.reply.sequences[index].scores or {}
            if any(not np.array_equal(kept[name], values) for name, values in given.items()):
                self._tally.fault(case.name, "the manifest has other scores than the reply")
            return
        prompt, generated = len(outcome.prompt), len(manifest.sequences[index].generated_token_ids)
        check_scores(case, kept, known, prompt - 1, generated, self._tally)

    async def _read_again(self, case: Case, acts: residuum.Activations) -> None:
        """Read the rows in another way, which must give the same bits."""
        self._tally.counts[f"captures read: {case.read}"] += 1
        layer, name = acts.layers[-1], case.name
        match case.read:
            case "many":
                self._many.append((case, acts))
                return
            case "sync":
                other = await asyncio.to_thread(self._blocking.activations, name, allow_partial=True)
            case "file":
                path = self._folder / f"{name}.safetensors"
                acts.to_safetensors(path)
                other = residuum.Activations.from_safetensors(path)
            case "export":
                path = self._folder / f"{name}.export.safetensors"
                await self._client.export(name, path, format="safetensors", allow_partial=True)
                other = residuum.Activations.from_safetensors(path)
            case "parts":
                last = int(acts.positions[-1]) if len(acts.positions) else 0
                other = await self._client.activations(
                    name, layers=[layer], sites=[acts.site], positions=range(last // 2, last + 1), allow_partial=True
                )
            case "rows":
                self._check_rows(name, layer, acts, await self._client.rows(
                    [name], layer=layer, site=acts.site, allow_partial=True
                ))  # fmt: skip
                return
            case _:
                other = await self._client.activations(name, allow_partial=True)
        whole = case.read != "parts"
        if not same(acts, other) or (whole and not same(other, acts)):
            self._tally.fault(name, f"reading it by {case.read} gives other rows")

    def _check_rows(self, name: str, layer: int, acts: residuum.Activations, rows: residuum.Rows) -> None:
        at = 0
        for sequence in acts.sequences:
            one = acts.select(sequence=sequence, site=acts.site)
            present = one.present[one.layers.index(layer)]
            part = slice(at, at + int(present.sum()))
            at = part.stop
            if not (
                np.array_equal(rows.values[part], one[layer][present])
                and np.array_equal(rows.positions[part], one.positions[present])
                and np.array_equal(rows.token_ids[part], one.token_ids[present])
                and (rows.sequences[part] == sequence).all()
            ):
                self._tally.fault(name, "client.rows gives other rows")
        if at != len(rows):
            self._tally.fault(name, "client.rows gives another number of rows")


_LIVES = {"read": "reads to the end", "abort": "aborts", "leave": "leaves"}


def _is_rightly_refused(case: Case, outcome: Outcome) -> bool:
    """Return whether a request was refused for a reason that random requests may have: one of its rules could never
    steer it, or its rules do not fit the worker's tables."""
    if not outcome.error.startswith("InvalidRequest"):
        return False
    prompt, most = len(outcome.prompt), int(case.sampling["max_tokens"])
    idle = [rule.given.name for rule in case.rules if rule.operations and not _may_steer(rule, prompt, most)]
    return "operations in tables" in outcome.error or any(
        f"steering of the rule {name} would never apply" in outcome.error for name in idle
    )


def _may_steer(rule: RuleDrawn, prompt: int, most: int) -> bool:
    return any(item.positions.wanted(prompt, prompt + most)[prompt:].any() for item in rule.operations)


def _take(asked: list[list[Placed]], change: SteeringChange) -> list[Placed] | None:
    """Return the next operations that were asked for and that a manifest's change has; None if there are none."""
    while asked:
        operations = asked.pop(0)
        if tuple(item.record() for item in operations) == change.steering:
            return operations
    return None


def _rule_of(case: Case, name: str) -> Sequence[Placed]:
    return next((rule.operations for rule in case.rules if rule.given.name == name), [])
