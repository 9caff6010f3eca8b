"""Reading rows: filters, slices and damaged chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2
from residuum.wire.rows.frames import ChunkView, checksum, chunk_prefix, parse_chunk, parse_read
from residuum.wire.selection import wanted_positions
from store_svc.database.db import Table, Txn
from store_svc.reading.slicing import slice_chunk
from tests.encoding_cases import FORMATS, basis, header_of, rows
from tests.store.support import (
    COMPLETE,
    INCOMPLETE,
    ONE_AND_SEVERAL,
    OPEN,
    POST,
    PRE,
    Client,
    describe,
    failing_with,
    grid,
    make_chunk,
    serving,
    stored_frames,
)

pytestmark = ONE_AND_SEVERAL

LAYERS = [0, 1, 2, 5, 6, 9]
PROMPT, GENERATED = 30, 41
LENGTH = PROMPT + GENERATED - 1


def fill(client: Client, capture_id: str = "a") -> None:
    """Write a capture of two sequences and two sites, in groups of layers and blocks of 32 positions."""
    client.open(describe(capture_id, layers=LAYERS, sites=[POST, PRE], prompt=PROMPT, sequences=2))
    chunks = [
        make_chunk(layers, range(first, min(first + 32, LENGTH + 1)), sequence=sequence, site=site)
        for sequence in (0, 1)
        for site in (POST, PRE)
        for first in (32, 0, 64)
        for layers in ([0, 1, 2], [5, 6, 9])
    ]
    client.append(chunks, capture_id)


selections = st.builds(
    selection_pb2.PositionSelection,
    phases=st.lists(st.sampled_from([selection_pb2.PHASE_PROMPT, selection_pb2.PHASE_GENERATED]), max_size=1),
    ranges=st.lists(
        st.builds(selection_pb2.PositionRange, first=st.integers(-5, 80), last=st.none() | st.integers(81, 90)),
        max_size=2,
    ),
    every=st.integers(0, 7),
)
subsets = st.builds(
    dict,
    layers=st.sets(st.sampled_from(LAYERS)),
    sites=st.sets(st.sampled_from([POST, PRE])),
    sequences=st.sets(st.sampled_from([0, 1])),
)


@pytest.mark.parametrize("sealed", [False, True])
def test_exactly_the_wanted_rows_are_sent(tmp_path: Path, sealed: bool) -> None:
    with serving(tmp_path / "store") as (_, client):
        fill(client)
        if sealed:
            assert client.seal(generated=[GENERATED, GENERATED - 8]).state == COMPLETE

        @settings(max_examples=40, deadline=None)
        @given(subsets, selections)
        def check(subset: dict[str, set[int]], positions: selection_pb2.PositionSelection) -> None:
            lengths = [LENGTH, LENGTH - 8] if sealed else [LENGTH + 1] * 2
            wanted = set()
            for sequence in subset["sequences"] or (0, 1):
                mask = wanted_positions(positions, PROMPT, 0, lengths[sequence])
                for site in subset["sites"] or (POST, PRE):
                    wanted |= grid(subset["layers"] or LAYERS, np.flatnonzero(mask).tolist(), sequence, site)
            cells, manifest = client.read(**subset, positions=positions)
            assert cells == wanted
            assert manifest == client.get()

        check()


def test_a_frame_with_only_wanted_rows_is_sent_unchanged(client: Client) -> None:
    client.open()
    chunk = make_chunk([0, 1, 2], range(5))
    client.append([chunk])
    client.seal(generated=[2])
    raw = client.channel.unary_stream("/residuum.v1.StoreService/ReadChunks")
    for layers in ([], [0, 1, 2]):
        request = store_pb2.ReadChunksRequest(capture_id="a", layers=layers)
        answers = list(raw(request.SerializeToString()))
        view = parse_read(answers[1])
        assert isinstance(view, ChunkView)
        assert answers[1].endswith(chunk)
        assert len(answers) == 3


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.data(),
    st.sampled_from([(1, "<f4"), (2, "<f2"), (3, "<u2")]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_a_slice_equals_numpys(
    data: st.DataObject, dtype: tuple[int, str], layers: int, positions: int, width: int
) -> None:
    number, name = dtype
    rows = np.arange(layers * positions * width).astype(name).reshape(layers, positions, width)
    header = capture_pb2.ChunkHeader(
        sequence=3, site=PRE, layers=range(7, 7 + layers), positions=range(positions), dtype=number, width=width
    )
    some = data.draw(st.sets(st.integers(0, layers - 1), min_size=1).map(sorted))
    few = data.draw(st.sets(st.integers(0, positions - 1), min_size=1).map(sorted))
    cut = parse_chunk(b"".join(slice_chunk(ChunkView(header, 0, memoryview(rows.tobytes())), some, few)))
    assert cut.verify()
    assert (cut.header.sequence, cut.header.site, cut.header.dtype) == (3, PRE, number)
    assert (list(cut.header.layers), list(cut.header.positions)) == ([7 + at for at in some], few)
    assert cut.rows().tobytes() == rows[np.ix_(some, few)].tobytes()


@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_checksums_of_layers_give_that_of_a_slice(
    data: st.DataObject, layers: int, positions: int, has_all_positions: bool
) -> None:
    header = capture_pb2.ChunkHeader(site=PRE, layers=range(layers), positions=range(positions), dtype=2, width=3)
    payload = np.random.default_rng(positions).bytes(layers * positions * 6)
    parts = [checksum(payload[at : at + positions * 6]) for at in range(0, len(payload), positions * 6)]
    whole = ChunkView(header, checksum(payload), memoryview(payload), layer_crc32c=parts)
    some = data.draw(st.sets(st.integers(0, layers - 1), min_size=1).map(sorted))
    few = range(positions) if has_all_positions else [positions - 1]
    prefix, cut = slice_chunk(whole, some, few)
    assert parse_chunk(prefix + cut).verify()
    assert (cut.obj is payload) == (len(few) == positions and some[-1] - some[0] + 1 == len(some))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data(), st.sampled_from(sorted(FORMATS)))
def test_a_slice_of_every_encoding_keeps_rows_and_prefixes(data: st.DataObject, name: str) -> None:
    form = FORMATS[name]
    payload = form.encode(rows(form.dtype, (3, 5, form.width)), basis(form))
    whole = ChunkView(header_of(form, [1, 2, 4], range(5), sequence=3), 0, memoryview(payload))
    some = data.draw(st.sets(st.integers(0, 2), min_size=1).map(sorted))
    few = data.draw(st.sets(st.integers(0, 4), min_size=1).map(sorted))
    cut = parse_chunk(b"".join(slice_chunk(whole, some, few)))
    assert cut.verify()
    assert (cut.format, cut.header.sequence) == (form, 3)
    (prefixes, encoded), (all_prefixes, all_rows) = cut.split(), whole.split()
    np.testing.assert_array_equal(encoded, all_rows[np.ix_(some, few)])
    if all_prefixes is not None:
        np.testing.assert_array_equal(prefixes, all_prefixes[some])
    np.testing.assert_array_equal(cut.rows(), whole.rows()[np.ix_(some, few)])


def test_layers_are_numbers_not_text(client: Client) -> None:
    client.open(describe(layers=range(12), prompt=1))
    client.append([make_chunk([layer], [0]) for layer in range(12)])
    client.seal(generated=[1])
    assert client.read(layers=[2, 10])[0] == grid([2, 10], [0])


def test_layers_sites_and_sequences_that_the_capture_lacks_are_refused(client: Client) -> None:
    client.open()
    with failing_with(Reason.ERROR_REASON_UNKNOWN_LAYER) as caught:
        client.read(layers=[1, 3])
    assert caught[0].metadata == {"layer": "3", "layers": "3"}
    with failing_with(Reason.ERROR_REASON_UNKNOWN_SITE) as caught:
        client.read(sites=[PRE])
    assert caught[0].message.endswith("has no site resid_pre. Choose among its sites: resid_post.")
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        client.read(sequences=[1])
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD):
        empty = selection_pb2.PositionRange(first=5, last=3)
        client.read(positions=selection_pb2.PositionSelection(ranges=[empty]))
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        client.read("b")


@pytest.mark.parametrize("state", [OPEN, COMPLETE])
def test_a_capture_that_is_deleted_while_it_is_read(client: Client, state: int) -> None:
    """The reader stops reading while the capture is deleted. Most of it is not in gRPC's buffers yet."""
    description = describe(layers=[0], prompt=64)
    description.hidden_size = width = 1 << 17
    client.open(description)
    payload = bytes(width * 4)
    for position in range(64):
        header = capture_pb2.ChunkHeader(site=POST, layers=[0], positions=[position], dtype=1, width=width)
        client.append([chunk_prefix(header, checksum(payload), len(payload)) + payload])
    if state != OPEN:
        client.seal(generated=[1])
    assert client.get().state == state
    answers = client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a"))
    next(answers)
    client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id="a"))
    with failing_with(Reason.ERROR_REASON_UNKNOWN_CAPTURE):
        list(answers)


def test_a_damaged_chunk_is_never_sent(tmp_path: Path) -> None:
    def damage(txn: Txn) -> None:
        ((key, value),) = stored_frames(txn)
        txn.put(Table.FRAMES, key, bytes(value[:-1]) + bytes([value[-1] ^ 1]))

    with serving(tmp_path / "store") as (store, client):
        client.open()
        client.append([make_chunk([0, 1, 2], range(5))])
        client.seal(generated=[2])
        store._db.write(damage)
        for layers in ([], [2]):
            with failing_with(Reason.ERROR_REASON_CHECKSUM_MISMATCH) as caught:
                client.read(layers=layers)
            assert caught[0].metadata == {"capture_id": "a"}
        assert client.get().state == COMPLETE


def test_a_store_starts_although_a_chunk_of_an_open_capture_is_damaged(tmp_path: Path, shards: int) -> None:
    def damage(txn: Txn) -> None:
        key, value = list(stored_frames(txn))[1]
        txn.delete(Table.FRAMES, key)
        txn.put(Table.FRAMES, key, b"\xff" * len(value))

    with serving(tmp_path / "store", shards=shards) as (store, client):
        for name in ("a", "b"):
            client.open(describe(name))
        client.append([make_chunk([0, 1, 2], [at]) for at in range(5)])
        client.append([make_chunk([0, 1, 2], range(5))], "b")
        store._db.write(damage)
    for _ in range(2):  # the second start finds it gone
        with serving(tmp_path / "store") as (store, client):
            assert client.get().num_rows == 3 * 4
            assert client.get("b").num_rows == 3 * 5
    with serving(tmp_path / "store", seal_timeout_seconds=0.2) as (store, client):
        client.seal(generated=[2])
        cells, manifest = client.read(follow=True)
        assert (cells, manifest.state) == (grid([0, 1, 2], [0, 2, 3, 4]), INCOMPLETE)
