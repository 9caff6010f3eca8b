"""Encoded and reduced captures from the real engine, through the real store, as the client reads them.

RAW rows of the same tokens give the expected values. test_rows.py compares RAW rows with transformers.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

import residuum
from residuum.v1 import store_pb2, store_pb2_grpc
from residuum.wire.rows.encodings import RowFormat
from residuum.wire.rows.projection import projection_matrix
from tests.conformance.engines import KV_BLOCK, KV_BLOCKS, RING_MIB
from tests.conformance.rows import EVERY_LAYER, make_prompt
from tests.reference.tiny import HIDDEN, LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from residuum import Activations
    from tests.conformance.engines import Engine
    from tests.reference.hf import Rows

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance")]

PROMPT = make_prompt(np.random.default_rng(40), 150)
SITES = ("resid_post", "attn_out")
DIMENSIONS, SEED = 24, 2**63 + 5
CLOSE = 2e-6
"""The largest relative difference between rows of the same tokens in two requests."""

REDUCTIONS = ("last", "mean", "max", "sum")


def vectors() -> list[residuum.Vector]:
    rng = np.random.default_rng(41)
    return [residuum.Vector.from_array(rng.standard_normal(HIDDEN).astype(np.float32)) for _ in range(3)]


def capture(encoding: str, **options: Any) -> residuum.Capture:
    """A capture of two sites, with the options that the encoding needs."""
    if encoding in ("rp", "rp8"):
        options |= {"dimensions": DIMENSIONS, "seed": SEED}
    elif encoding in ("topk", "topk8"):
        options |= {"dimensions": DIMENSIONS}
    elif encoding == "project":
        options |= {"vectors": vectors()}
    return residuum.Capture(sites=SITES, encoding=encoding, **options)  # type: ignore[arg-type]


def expected(raw: Rows, encoding: str) -> tuple[Rows, Rows | float]:
    """Return the expected values of encoded rows [rows, hidden], float64, and the largest error."""
    raw = raw.astype(np.float64)
    noise = CLOSE * np.abs(raw).max()
    if encoding in ("rp", "rp8"):
        wanted = raw @ projection_matrix(SEED, HIDDEN, DIMENSIONS).astype(np.float64)
        noise *= np.sqrt(HIDDEN)
    elif encoding == "project":
        wanted = raw @ np.stack([vector.values for vector in vectors()], axis=1).astype(np.float64)
        noise *= 10 * np.sqrt(HIDDEN)
    elif encoding in ("topk", "topk8"):
        least = np.sort(np.abs(raw), axis=1)[:, -DIMENSIONS, None]
        wanted = np.where(np.abs(raw) >= least, raw, 0.0)
    else:
        wanted = raw
    listed = np.where(wanted == 0, np.nan, wanted) if encoding == "topk8" else wanted
    spread = np.nanmax(listed, axis=1, keepdims=True) - np.nanmin(listed, axis=1, keepdims=True)
    steps = {"fp16": 2.0**-11 * np.abs(raw), "bf16": 2.0**-8 * np.abs(raw)}
    if encoding.endswith("8"):
        return wanted, spread / 255 / 2 * 1.001 + noise
    return wanted, steps.get(encoding, 0.0) + noise


def check_rows(acts: Activations, raw: Activations, encoding: str) -> None:
    assert acts.encoding == encoding
    assert acts.manifest.state == "complete"
    for site in SITES:
        one, other = acts.select(site=site), raw.select(site=site)
        assert one.layers == other.layers
        assert np.array_equal(one.positions, other.positions)
        for layer in one.layers:
            wanted, bound = expected(other[layer], encoding)
            assert (np.abs(one[layer] - wanted) <= bound).all(), (site, layer)


def reduced(rows: Rows, reduction: str) -> Rows:
    """Return the reduction of rows [rows, hidden], float64."""
    rows = rows.astype(np.float64)
    if reduction == "last":
        return rows[-1]
    return np.asarray({"mean": rows.mean, "max": rows.max, "sum": rows.sum}[reduction](axis=0))


def check_reduced(acts: Activations, raw: Activations, reduction: str, sequence: int = 0) -> None:
    """Check that each phase with RAW rows has one row, at its last position, and check its values."""
    assert acts.manifest.state == "complete", acts.manifest.describe_missing()
    prompt = len(raw.manifest.prompt_token_ids)
    for site in SITES:
        one, other = (item.select(site=site, sequence=sequence) for item in (acts, raw))
        positions = other.positions
        phases = [phase for phase in (positions < prompt, positions >= prompt) if phase.any()]
        assert one.positions.tolist() == [positions[phase].max() for phase in phases]
        for layer in EVERY_LAYER:
            wanted = np.stack([reduced(other[layer][phase], reduction) for phase in phases])
            np.testing.assert_allclose(one[layer], wanted, atol=1e-5 * np.abs(wanted).max())


def stored_bytes(engine: Engine, capture_id: str) -> int:
    """Return the payload bytes in the store. Each payload must be as long as its header says."""
    total = 0
    with grpc.insecure_channel(engine.store.endpoint) as channel:
        request = store_pb2.ReadChunksRequest(capture_id=capture_id)
        for response in store_pb2_grpc.StoreServiceStub(channel).ReadChunks(request, timeout=60):
            if response.WhichOneof("content") == "chunk":
                header, payload = response.chunk.header, response.chunk.payload
                assert len(payload) == RowFormat.of(header).payload_bytes(len(header.layers), len(header.positions))
                total += len(payload)
    return total


_RAW: dict[tuple[residuum.Client, str, int], Activations] = {}


def raw_rows(engine: Engine, max_tokens: int, positions: Any = None) -> Activations:
    """Return RAW rows of the greedy reply to PROMPT, from one request for all tests that need the same ones."""
    key = (engine.client, str(positions), max_tokens)
    if key not in _RAW:
        plain = residuum.Capture(sites=SITES, positions=positions)
        reply = engine.client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True, capture=plain)
        _RAW[key] = engine.client.activations(reply.request_id)
    return _RAW[key]


@pytest.mark.parametrize("encoding", ["raw", "fp32", "fp16", "bf16", "full8", "rp8", "topk8", "rp", "topk", "project"])
def test_rows_of_every_encoding(engine: Engine, encoding: str) -> None:
    """A prompt in three chunks, and a reply longer than a block."""
    reply = engine.client.generate(PROMPT, max_tokens=50, ignore_eos=True, capture=capture(encoding))
    acts, raw = engine.client.activations(reply.request_id), raw_rows(engine, max_tokens=50)
    assert acts.manifest.sequences[0].generated_token_ids == raw.manifest.sequences[0].generated_token_ids
    assert raw.encoding == "raw"
    check_rows(acts, raw, encoding)
    row_bytes = {
        "raw": 4 * HIDDEN, "fp32": 4 * HIDDEN, "fp16": 2 * HIDDEN, "bf16": 2 * HIDDEN, "full8": 8 + HIDDEN,
        "rp8": 8 + DIMENSIONS, "rp": 4 * DIMENSIONS, "topk8": 8 + 3 * DIMENSIONS, "topk": 6 * DIMENSIONS, "project": 12,
    }  # fmt: skip
    assert stored_bytes(engine, reply.request_id) == 199 * len(SITES) * LAYERS * row_bytes[encoding]


def test_rows_along_dimensions(engine: Engine) -> None:
    """The error of each number is at most half a quantisation step of its dimension, over some rows or all of them."""
    reply = engine.client.generate(
        PROMPT, max_tokens=50, ignore_eos=True, capture=capture("full8", axis="dimension")
    )  # fmt: skip
    acts, raw = engine.client.activations(reply.request_id), raw_rows(engine, max_tokens=50)
    for site in SITES:
        for layer in EVERY_LAYER:
            got, wanted = acts.select(site=site)[layer], raw.select(site=site)[layer]
            spread = wanted.max(axis=0) - wanted.min(axis=0)
            assert (np.abs(got - wanted) <= spread / 255 / 2 * 1.001 + CLOSE * np.abs(wanted).max()).all()
            assert np.abs(got - wanted).max() > 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [None, "prompt", "generated", [3, (60, 155)]], ids=str)
def test_one_row_of_each_phase(engine: Engine, reduction: str, positions: Any) -> None:
    one_row = capture("fp32", positions=positions, reduction=reduction)
    reply = engine.client.generate(PROMPT, max_tokens=70, ignore_eos=True, capture=one_row)
    check_reduced(engine.client.activations(reply.request_id), raw_rows(engine, 70, positions), reduction)


@pytest.mark.parametrize("encoding", ["raw", "full8", "rp8", "topk8", "topk", "project"])
def test_one_row_of_every_encoding(engine: Engine, encoding: str) -> None:
    reply = engine.client.generate(
        PROMPT, max_tokens=50, ignore_eos=True, capture=capture(encoding, reduction="mean")
    )  # fmt: skip
    plain = residuum.Capture(sites=SITES, encoding="fp32", reduction="mean")
    other = engine.client.generate(PROMPT, max_tokens=50, ignore_eos=True, capture=plain)
    acts, raw = (engine.client.activations(item.request_id) for item in (reply, other))
    assert len(raw.positions) == 2
    check_rows(acts, raw, encoding)


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 40])
def test_short_replies(engine: Engine, max_tokens: int) -> None:
    both = [capture("fp32", reduction="sum"), residuum.Capture(sites=SITES)]
    replies = [engine.client.generate(PROMPT[:5], max_tokens=max_tokens, ignore_eos=True, capture=c) for c in both]
    acts, raw = (engine.client.activations(reply.request_id) for reply in replies)
    check_reduced(acts, raw, "sum")
    assert len(acts.positions) == (1 if max_tokens == 1 else 2)


def test_a_stop_string(engine: Engine) -> None:
    """The engine computes beyond the end. The reduction must not include those rows."""
    with engine.client.stream(PROMPT[:40], max_tokens=40, ignore_eos=True) as stream:
        pieces = [delta.text for delta in stream]
    text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces]).tolist()
    stop = next(
        piece
        for piece, end in zip(pieces[8:], ends[8:], strict=True)
        if len(piece.strip()) > 2 and piece.isascii() and text.find(piece) + len(piece) == end
    )
    both = [capture("fp32", reduction="mean"), residuum.Capture(sites=SITES)]
    replies = [
        engine.client.generate(PROMPT[:40], max_tokens=40, ignore_eos=True, stop=[stop], capture=item) for item in both
    ]
    assert {reply.finish_reason for reply in replies} == {"stop"}
    acts, raw = (engine.client.activations(reply.request_id) for reply in replies)
    check_reduced(acts, raw, "mean")
    computed = max(first + count for first, count in engine.journal.chunks(replies[0].request_id))
    assert computed > 1 + acts.positions.max(), "the engine computed beyond the stop string"


def test_sequences_of_one_prompt(engine: Engine) -> None:
    settings: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 40, "ignore_eos": True}
    both = [capture("fp32", reduction="max"), capture("fp32")]
    replies = [engine.client.generate(PROMPT[:30], capture=item, **settings) for item in both]
    assert [item.token_ids for item in replies[0].sequences] == [item.token_ids for item in replies[1].sequences]
    acts, raw = (engine.client.activations(reply.request_id) for reply in replies)
    for sequence in range(3):
        check_reduced(acts, raw, "max", sequence)


def test_preempted_requests(engine: Engine) -> None:
    """Encoded and reduced captures of preempted requests, in one batch."""
    rng = np.random.default_rng(42)
    kinds = [("rp8", None), ("full8", None), ("topk", None), ("project", None), *(("fp32", r) for r in REDUCTIONS)]
    prompts = [make_prompt(rng, int(rng.integers(20, 100))) for _ in range(14)]
    with engine.held(*vectors()):
        streams = [
            engine.client.stream(
                prompt,
                max_tokens=200,
                ignore_eos=True,
                capture=capture(kinds[index % len(kinds)][0], reduction=kinds[index % len(kinds)][1]),
            )
            for index, prompt in enumerate(prompts)
        ]
    for stream in streams:
        for _ in stream:
            pass
    assert sum(len(prompt) + 200 for prompt in prompts) > KV_BLOCK * KV_BLOCKS
    assert any(engine.journal.preemptions(stream.reply.request_id) for stream in streams)
    for index, stream in enumerate(streams):
        reply = stream.reply
        tokens = [*reply.prompt_token_ids, *reply.token_ids[:-1]]
        raw = rows_of(engine, tokens)
        acts, (encoding, reduction) = engine.client.activations(reply.request_id), kinds[index % len(kinds)]
        assert acts.manifest.state == "complete"
        for site in SITES:
            for layer in EVERY_LAYER:
                got, rows = acts.select(site=site)[layer], raw[site][layer]
                if reduction:
                    phases = rows[: len(reply.prompt_token_ids)], rows[len(reply.prompt_token_ids) :]
                    wanted = np.stack([reduced(phase, reduction) for phase in phases])
                    np.testing.assert_allclose(got, wanted, atol=2e-4 * np.abs(wanted).max())
                elif encoding != "topk":  # either of two nearly equal elements may be kept
                    exact, bound = expected(rows, encoding)
                    assert (np.abs(got - exact) <= bound + 2e-4 * np.abs(exact).max()).all()


def test_encoded_rows_that_are_shed_are_named(engine: Engine) -> None:
    """The store is stopped until the ring is full. Complete captures are right, and incomplete ones say so."""
    shed = [capture("full8", overflow="shed"), capture("fp32", reduction="sum", overflow="shed")]
    held = (RING_MIB << 20) // (len(SITES) * LAYERS * (8 + HIDDEN))  # positions that the ring holds
    assert held < 11 * 400
    try:
        with engine.held():
            streams = [
                engine.client.stream(PROMPT[:20], max_tokens=400, ignore_eos=True, capture=shed[index == 11])
                for index in range(12)
            ]
            engine.store.process.send_signal(signal.SIGSTOP)
        for stream in streams:
            for _ in stream:
                pass
    finally:
        engine.store.process.send_signal(signal.SIGCONT)
    manifests = [engine.client.manifest(stream.reply, wait=60) for stream in streams]
    assert {manifest.state for manifest in manifests} <= {"complete", "incomplete"}
    incomplete = [manifest for manifest in manifests if manifest.state == "incomplete"]
    assert incomplete
    for manifest in incomplete:
        assert manifest.reason == "OVERFLOW"
        assert manifest.missing
    other = engine.client.generate(PROMPT[:20], max_tokens=400, ignore_eos=True, capture=residuum.Capture(sites=SITES))
    raw = engine.client.activations(other.request_id)
    for stream, manifest in zip(streams, manifests, strict=True):
        assert stream.reply.token_ids == other.token_ids
        if manifest.state == "complete" and stream is not streams[11]:
            acts = engine.client.activations(stream.request_id)
            assert len(acts.positions) == len(raw.positions)


def rows_of(engine: Engine, tokens: Iterable[int]) -> dict[str, dict[int, Rows]]:
    """Return RAW rows of tokens that are all given as a prompt."""
    reply = engine.client.generate(list(tokens), max_tokens=1, ignore_eos=True, capture=residuum.Capture(sites=SITES))
    acts = engine.client.activations(reply.request_id)
    return {site: {layer: acts.select(site=site)[layer] for layer in EVERY_LAYER} for site in SITES}
