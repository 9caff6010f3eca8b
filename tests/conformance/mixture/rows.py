"""Checks captures: which rows there are, their values, and that every way of reading gives the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.conformance.mixture.captures import error_of, noise_of, reduce
from tests.conformance.rows import Row, _named

if TYPE_CHECKING:
    import residuum
    from tests.conformance.mixture.captures import Asked
    from tests.conformance.mixture.cases import Case, Outcome
    from tests.conformance.mixture.expected import Expected
    from tests.conformance.mixture.tally import Tally
    from tests.conformance.mixture.world import World


def check_presence(case: Case, manifest: residuum.Manifest, expected: list[Expected], tally: Tally) -> None:
    """Check that exactly the wanted rows are named, as present or as missing, and that an abort leaves no gap."""
    asked = case.capture
    assert asked is not None
    prompt = len(manifest.prompt_token_ids)
    present, missing = _named(manifest.present), _named(manifest.missing)
    wanted = {
        Row(index, site, layer, position)
        for index, known in enumerate(expected)
        for position in asked.wanted(prompt, len(known.tokens))
        for site, layers in asked.layers.items()
        for layer in layers
    }
    tally.counts["rows named present"] += len(present)
    tally.counts["rows named missing"] += len(missing)
    if present & missing:
        tally.fault(case.name, f"{len(present & missing)} rows are named present and missing")
    if present - wanted:
        tally.fault(case.name, f"rows that were not asked for, first {min(present - wanted)}")
    if wanted - present - missing:
        tally.fault(case.name, f"{manifest.state}: rows that are not named, first {min(wanted - present - missing)}")
    if missing - wanted:
        tally.fault(case.name, f"missing rows that were not asked for, first {min(missing - wanted)}")
    if manifest.state == "complete" and missing:
        tally.fault(case.name, f"complete, but {len(missing)} rows are missing")
    if manifest.num_rows != len(present):
        tally.fault(case.name, f"num_rows is {manifest.num_rows}, not {len(present)}")
    if manifest.state == "incomplete" and (manifest.reason != "OVERFLOW" or not missing):
        tally.fault(case.name, f"incomplete because of {manifest.reason!r}, with {len(missing)} missing rows")
    if asked.reduction == "none" and manifest.state != "incomplete" and asked.given.overflow == "wait":
        _check_gaps(case, asked, manifest, expected, present, tally)


def _check_gaps(
    case: Case,
    asked: Asked,
    manifest: residuum.Manifest,
    expected: list[Expected],
    present: set[Row],
    tally: Tally,
) -> None:
    prompt = len(manifest.prompt_token_ids)
    for index, known in enumerate(expected):
        asked_for = asked.wanted(prompt, len(known.tokens))
        there = {(site, layer): list[int]() for site, layers in asked.layers.items() for layer in layers}
        for row in sorted(present):
            if row.sequence == index and (row.site, row.layer) in there:
                there[row.site, row.layer].append(row.position)
        lengths = {len(positions) for positions in there.values()}
        if any(positions != asked_for[: len(positions)] for positions in there.values()) or len(lengths) > 1:
            tally.fault(case.name, f"{manifest.state}: sequence {index} has gaps: {there}, of {asked_for}")
        if manifest.sequences[index].generated_token_ids and lengths != {len(asked_for)}:
            tally.fault(case.name, f"{manifest.state}: sequence {index} lacks rows of tokens that were delivered")


def check_values(case: Case, acts: residuum.Activations, expected: list[Expected], world: World, tally: Tally) -> None:
    """Compare every present row with the reference."""
    asked = case.capture
    assert asked is not None
    prompt = len(acts.manifest.prompt_token_ids)
    for index, known in enumerate(expected):
        for site, layers in asked.layers.items():
            if index not in acts.sequences or site not in acts.sites:
                if asked.wanted(prompt, len(known.tokens)):
                    tally.fault(case.name, f"the client has no {site} of sequence {index}")
                continue
            one = acts.select(sequence=index, site=site)
            if one.layers != layers:
                tally.fault(case.name, f"{site} has the layers {one.layers}, not {layers}")
                continue
            for layer in layers:
                _check_place(case, asked, one, known, layer, prompt, world, tally)


def _check_place(
    case: Case,
    asked: Asked,
    one: residuum.Activations,
    known: Expected,
    layer: int,
    prompt: int,
    world: World,
    tally: Tally,
) -> None:
    rows = known.at(one.site, layer, before_steering=asked.before_steering)
    positions = one.positions.tolist()
    if asked.reduction == "none":
        sources = {position: [position] for position in positions}
    else:
        sources = {phase[-1]: phase for phase in asked.phases(prompt, len(known.tokens))}
    present = one.present[one.layers.index(layer)]
    chosen = [
        at
        for at, position in enumerate(positions)
        if present[at] and position in sources and max(sources[position]) < known.decided
    ]
    tally.counts["rows compared"] += len(chosen)
    tally.counts["rows left out, after a tie"] += int(present.sum()) - len(chosen)
    if not chosen:
        return
    exact = np.stack([reduce(rows[sources[positions[at]]], asked.reduction) for at in chosen]) if (
        asked.reduction != "none"
    ) else rows[[positions[at] for at in chosen]].astype(np.float64)  # fmt: skip
    noise = noise_of(exact)
    if asked.reduction in {"mean", "sum", "max"}:  # each of the rows may be off
        parts = [noise_of(rows[sources[positions[at]]].astype(np.float64)) for at in chosen]
        noise = np.array([{"mean": part.mean, "max": part.max, "sum": part.sum}[asked.reduction]() for part in parts])
    steps, within = None, True
    if asked.encoding == "full8" and asked.given.axis == "dimension":
        if len(chosen) < len(positions):  # rows that are left out share their steps
            return
        encoded = one.encoded(layer)
        steps = encoded["scale"][encoded["group"]][chosen]
        # Rows that the engine computed after the end of a reply were encoded together with the last ones.
        within = one.manifest.sequences[one.sequence].finish_reason == "length"
        tally.counts["places whose steps are checked"] += within
    part = error_of(one[layer][chosen], exact, noise, asked, world, steps, within=within)
    kind = asked.encoding if asked.reduction == "none" else f"{asked.encoding}, {asked.reduction}"
    tally.counts[f"places compared: {kind}"] += 1
    tally.see(f"rows: {asked.encoding}{'' if asked.reduction == 'none' else ', reduced'}", part)
    if not part <= 1:
        errors = [
            error_of(
                one[layer][[at]],
                exact[[i]],
                noise[[i]],
                asked,
                world,
                None if steps is None else steps[[i]],
                within=False,
            )
            for i, at in enumerate(chosen)
        ]
        wrong = [positions[at] for at, error in zip(chosen, errors, strict=True) if not error <= 1]
        tally.fault(
            case.name,
            f"{one.site}.{layer}, sequence {one.sequence}, {kind}: {part:.3g} times too far off; {len(wrong)} of "
            f"{len(chosen)} positions, first {wrong[:3]} (prompt {prompt})",
        )


def same(one: residuum.Activations, other: residuum.Activations) -> bool:
    """Return whether two readings have the same bits at all places of the second one."""
    for sequence in other.sequences:
        for site in other.sites:
            if sequence not in one.sequences or site not in one.sites:
                return False
            first, second = one.select(sequence=sequence, site=site), other.select(sequence=sequence, site=site)
            at = np.searchsorted(first.positions, second.positions)
            if at.max(initial=-1) >= len(first.positions) or (first.positions[at] != second.positions).any():
                return False
            if any(not np.array_equal(first[layer][at], second[layer], equal_nan=True) for layer in second.layers):
                return False
    return True


def check_followed(case: Case, outcome: Outcome, acts: residuum.Activations, tally: Tally) -> None:
    """Check that the rows that came while the request generated are those of the capture."""
    sequence, found = case.sequences - 1, {}
    for site, layer, positions, rows in outcome.followed:
        for position, row in zip(positions.tolist(), rows, strict=True):
            if (site, layer, position) in found:
                tally.fault(case.name, f"{site}.{layer}, position {position}: followed twice")
            found[site, layer, position] = row
    tally.counts["rows followed"] += len(found)
    if sequence not in acts.sequences:
        return
    for site in acts.sites:
        one = acts.select(sequence=sequence, site=site)
        for at, layer in enumerate(one.layers):
            for position, row, there in zip(one.positions.tolist(), one[layer], one.present[at], strict=True):
                if there and not np.array_equal(found.get((site, layer, position), np.nan), row, equal_nan=True):
                    tally.fault(case.name, f"{site}.{layer}, position {position}: followed rows differ")
                    return
