"""The rows that a capture must hold: exactly the requested ones, each once, with the reference's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import grpc
import numpy as np

import residuum
from bench.conformance.reference import SITES
from residuum.v1 import store_pb2, store_pb2_grpc
from residuum.values.selections.points import SITE_NAMES
from tests.reference.hf import relative_error
from tests.reference.tiny import LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bench.conformance.reference import Changes, Rows
    from residuum.values.captures.manifest import Manifest
    from residuum.values.captures.manifest_records import RowSet
    from tests.conformance.engines import Engine
    from tests.reference.hf import Reference

    Wanted = Callable[[int, int], Iterable[int]]
    """Returns the wanted positions of a sequence, from its number of prompt tokens and its number of rows."""

    Layers = Sequence[int] | Mapping[str, Sequence[int]]
    """Layers of all sites, or those of each site."""

MAX_ERROR = 2e-4
"""Both sides compute in float32, in different orders. Rows of another token or layer differ by about 1."""

EVERY_LAYER = tuple(range(LAYERS))

ALL = residuum.Capture(layers=EVERY_LAYER, sites=SITES)
"""All rows of a capture."""


class Row(NamedTuple):
    """The name of a row."""

    sequence: int
    site: str
    layer: int
    position: int


def everything(prompt_tokens: int, rows: int) -> Iterable[int]:
    """Want every position."""
    return range(rows)


def make_prompt(rng: np.random.Generator, size: int) -> list[int]:
    """Return random token ids."""
    return [int(token) for token in rng.integers(10, 40_000, size=size)]


def stored_rows(engine: Engine, capture_id: str) -> dict[Row, Rows]:
    """Return every row that the store has of a capture, read from its messages. No row may occur twice."""
    found: dict[Row, Rows] = {}
    with grpc.insecure_channel(engine.store.endpoint) as channel:
        request = store_pb2.ReadChunksRequest(capture_id=capture_id)
        for response in store_pb2_grpc.StoreServiceStub(channel).ReadChunks(request, timeout=60):
            if response.WhichOneof("content") != "chunk":
                continue
            header = response.chunk.header
            shape = (len(header.layers), len(header.positions), header.width)
            values = np.frombuffer(response.chunk.payload, dtype="<f4").reshape(shape)
            for i, layer in enumerate(header.layers):
                for j, position in enumerate(header.positions):
                    row = Row(header.sequence, SITE_NAMES[header.site], layer, position)
                    assert row not in found, f"{row} was sent twice"
                    found[row] = values[i, j]
    return found


def check_capture(
    engine: Engine,
    reference: Reference,
    reply: residuum.Reply,
    *,
    sites: Sequence[str] = SITES,
    layers: Layers = EVERY_LAYER,
    wanted: Wanted = everything,
    changes: Changes | None = None,
) -> dict[Row, Rows]:
    """Check a complete capture: it holds exactly the requested rows, with the reference's values.

    Args:
        engine: The engine that captured.
        reference: The same model in transformers.
        reply: The request's reply.
        sites: The requested sites.
        layers: The requested layers, or those of each site.
        wanted: The requested positions.
        changes: The steering for the reference.

    Returns:
        The rows.
    """
    rows = check_complete(
        engine, reference, reply.request_id, sites=sites, layers=layers, wanted=wanted, changes=changes
    )
    manifest = engine.client.manifest(reply.request_id)
    assert manifest.prompt_token_ids == reply.prompt_token_ids
    assert [item.generated_token_ids for item in manifest.sequences] == [item.token_ids for item in reply.sequences]
    return rows


def check_complete(
    engine: Engine,
    reference: Reference,
    request_id: str,
    *,
    sites: Sequence[str] = SITES,
    layers: Layers = EVERY_LAYER,
    wanted: Wanted = everything,
    changes: Changes | None = None,
) -> dict[Row, Rows]:
    """The same check for a request whose reply is known only from its manifest."""
    manifest = engine.client.manifest(request_id, wait=30)
    assert manifest.state == "complete", f"{manifest.state}: {manifest.describe_missing()}"
    expected = _expected_rows(manifest, reference, sites, layers, wanted, changes)
    rows = stored_rows(engine, request_id)
    _compare(rows, expected)
    assert _named(manifest.present) == expected.keys(), "the manifest lists exactly the present rows"
    assert manifest.num_rows == len(expected)
    assert not manifest.missing
    if expected:
        _check_client(engine, request_id, rows)
    return rows


def check_partial(
    engine: Engine,
    reference: Reference,
    request_id: str,
    *,
    sites: Sequence[str] = SITES,
    layers: Layers = EVERY_LAYER,
    wanted: Wanted = everything,
) -> dict[Row, Rows]:
    """Check an incomplete capture: its rows are right, and its manifest names every missing row.

    Returns:
        The rows.
    """
    manifest = engine.client.manifest(request_id, wait=60)
    assert manifest.state in {"aborted", "incomplete"}
    expected = _expected_rows(manifest, reference, sites, layers, wanted, None)
    rows = stored_rows(engine, request_id)
    assert not rows.keys() - expected.keys(), "only requested rows"
    _compare(rows, {row: expected[row] for row in rows})
    assert _named(manifest.present) == rows.keys()
    assert _named(manifest.missing) == expected.keys() - rows.keys(), "the manifest lists exactly the missing rows"
    assert manifest.num_rows == len(rows)
    return rows


def check_aborted(engine: Engine, reference: Reference, request_id: str, wanted: Wanted = everything) -> None:
    """Check the rows of a request that was stopped and that captures every site of every layer.

    The rows of each sequence must be a beginning without gaps, of equal length at every site of every layer. If a token
    of the reply was delivered, all rows before it must be there, because they were computed.
    """
    rows = check_partial(engine, reference, request_id, wanted=wanted)
    manifest = engine.client.manifest(request_id)
    assert manifest.state == "aborted"
    prompt = len(manifest.prompt_token_ids)
    for sequence, outcome in enumerate(manifest.sequences):
        generated = len(outcome.generated_token_ids)
        asked = sorted(set(wanted(prompt, prompt + max(generated - 1, 0))))
        there = {(site, layer): list[int]() for site in SITES for layer in EVERY_LAYER}
        for row in sorted(rows):
            if row.sequence == sequence:
                there[row.site, row.layer].append(row.position)
        first = there[SITES[0], 0]
        assert all(positions == first for positions in there.values())
        assert first == asked[: len(first)]
        if generated:
            assert first == asked


def _expected_rows(
    manifest: Manifest,
    reference: Reference,
    sites: Sequence[str],
    layers: Layers,
    wanted: Wanted,
    changes: Changes | None,
) -> dict[Row, Rows]:
    expected: dict[Row, Rows] = {}
    prompt = manifest.prompt_token_ids
    for sequence, outcome in enumerate(manifest.sequences):
        # The model never gets the last generated token as input.
        token_ids = prompt + outcome.generated_token_ids[:-1]
        values = reference.rows(token_ids, changes)
        positions = sorted(set(wanted(len(prompt), len(token_ids))))
        for site in sites:
            for layer in layers if isinstance(layers, Sequence) else layers[site]:
                for position in positions:
                    expected[Row(sequence, site, layer, position)] = values[site][layer, position]
    return expected


def _compare(rows: Mapping[Row, Rows], expected: Mapping[Row, Rows]) -> None:
    missing, beyond = sorted(expected.keys() - rows.keys()), sorted(rows.keys() - expected.keys())
    assert not missing, f"{len(missing)} rows are missing, first {missing[:3]}"
    assert not beyond, f"{len(beyond)} rows were not requested, first {beyond[:3]}"
    for site in {name.site for name in expected}:  # rows of another site may have another width
        names = sorted(name for name in expected if name.site == site)
        error = relative_error(np.stack([rows[name] for name in names]), np.stack([expected[name] for name in names]))
        assert error < MAX_ERROR, site


def _named(sets: Iterable[RowSet]) -> set[Row]:
    return {
        Row(rows.sequence, rows.site, layer, position)
        for rows in sets
        for layer in rows.layers
        for first, last in rows.ranges
        for position in range(first, last + 1)
    }


def _check_client(engine: Engine, capture_id: str, rows: Mapping[Row, Rows]) -> None:
    """Check that the client returns the same rows, under the same names."""
    acts = engine.client.activations(capture_id)
    for sequence in acts.sequences:
        for site in acts.sites:
            one = acts.select(sequence=sequence, site=site)
            for layer in one.layers:
                values = one[layer]
                for position, value in zip(one.positions.tolist(), values, strict=True):
                    assert np.array_equal(value, rows[Row(sequence, site, layer, position)])
    assert acts.nbytes == sum(row.nbytes for row in rows.values()), "the client has no other rows"
