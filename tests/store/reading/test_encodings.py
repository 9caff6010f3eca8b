"""Captures of every encoding and reduction over real gRPC: stored, repeated, sliced and read."""

from __future__ import annotations

import numpy as np
import pytest

from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2
from residuum.wire.rows.encodings import FULL8, RP8, RowFormat
from residuum.wire.rows.frames import ChunkView, checksum, chunk_prefix, parse_chunk
from tests.encoding_cases import FORMATS, basis, header_of, rows
from tests.store.support import COMPLETE, POST, Client, cells_of, describe, failing_with, grid

LAYERS, PROMPT, LENGTH = (0, 1, 2), 6, 9


def describe_format(form: RowFormat, **spec: object) -> capture_pb2.CaptureDescription:
    description = describe(layers=LAYERS, prompt=PROMPT, width=form.width, **spec)
    description.dtype = form.dtype
    description.spec.encoding = form.encoding
    options = description.spec.encoding_options
    options.axis = form.axis
    if form is FORMATS["project"]:
        options.vectors.extend(bytes([number] * 32) for number in range(form.dimensions))
    else:
        options.dimensions = form.dimensions
    if form.features:
        options.sae.features = form.features
    return description


def frame(form: RowFormat, layers: list[int], positions: list[int], seed: int = 0) -> bytes:
    payload = form.encode(rows(form.dtype, (len(layers), len(positions), form.width), seed), basis(form))
    return chunk_prefix(header_of(form, layers, positions), checksum(payload), len(payload)) + payload


def decoded(chunk: ChunkView) -> dict[tuple[int, int], np.ndarray]:
    """Return the rows of a chunk by layer and position."""
    values = chunk.rows()
    header = chunk.header
    return {
        (layer, position): values[at, to]
        for at, layer in enumerate(header.layers)
        for to, position in enumerate(header.positions)
    }


def stored(client: Client, **query: object) -> dict[tuple[int, int], np.ndarray]:
    """Read all rows. Fails on a duplicate row."""
    found: dict[tuple[int, int], np.ndarray] = {}
    answers = list(client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", **query), timeout=30))
    for answer in answers[1:-1]:
        news = decoded(parse_chunk(answer.chunk.SerializeToString()))
        assert not found.keys() & news.keys()
        found |= news
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_encoding_come_back_unchanged(client: Client, name: str) -> None:
    """If two chunks overlap, the store keeps only the second chunk's new rows, with their prefix."""
    form = FORMATS[name]
    client.open(describe_format(form))
    first, second = frame(form, [0, 1, 2], [0, 1, 2, 3, 4]), frame(form, [1, 2], [3, 4, 5, 6, 7, 8], seed=1)
    third = frame(form, [0], list(range(5, 9)), seed=2)
    client.append([first, second, third, second])
    manifest = client.seal(generated=[LENGTH - PROMPT + 1])
    assert manifest.state == COMPLETE
    assert manifest.num_rows == len(LAYERS) * LENGTH

    expected = decoded(parse_chunk(second)) | decoded(parse_chunk(third)) | decoded(parse_chunk(first))
    for query in ({}, {"layers": [1]}, {"positions": selection_pb2.PositionSelection(every=4)}):
        wanted = {
            key
            for key in expected
            if key[0] in query.get("layers", LAYERS) and ("positions" not in query or key[1] % 4 == 0)
        }
        found = stored(client, **query)
        assert found.keys() == wanted
        for key, values in found.items():
            np.testing.assert_array_equal(values, expected[key])


def test_a_chunk_of_another_encoding_is_rejected(client: Client) -> None:
    form = FORMATS["rp8"]
    client.open(describe_format(form))
    for other in (FORMATS["raw"], FORMATS["full8"], RowFormat(RP8, form.width, form.dtype, dimensions=9)):
        answers = client.append([frame(other, [0], [0])])
        (rejection,) = (item for answer in answers for item in answer.rejections)
        assert rejection.error.reason == Reason.ERROR_REASON_INVALID_FIELD
        assert "the capture's rows are rp8 of 10 dimensions" in rejection.error.message


def test_a_capture_of_an_invalid_encoding_is_refused(client: Client) -> None:
    description = describe_format(FORMATS["full8"])
    description.spec.encoding_options.dimensions = 3
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD) as caught:
        client.open(description)
    assert caught[0].metadata == {"field": "description.spec.encoding"}
    description = describe_format(FORMATS["raw"], reduction=9)
    with failing_with(Reason.ERROR_REASON_INVALID_FIELD) as caught:
        client.open(description)
    assert caught[0].metadata == {"field": "description.spec.reduction"}


def test_bytes_that_do_not_fit_the_encoding_are_rejected(client: Client) -> None:
    form = RowFormat(FULL8, 24, FORMATS["full8"].dtype)
    client.open(describe_format(form))
    payload = b"x" * (form.payload_bytes(1, 2) - 1)
    head = header_of(form, [0], [0, 1])
    answers = client.append([chunk_prefix(head, checksum(payload), len(payload)) + payload])
    (rejection,) = (item for answer in answers for item in answer.rejections)
    assert "describes 64 bytes, but its payload has 63" in rejection.error.message


# Reductions


def test_a_reduced_encoding_expects_the_last_row_of_each_phase(client: Client) -> None:
    """Rows at earlier positions of generated tokens are valid until the length is known, and invalid afterwards."""
    form = FORMATS["fp32"]
    client.open(describe_format(form, reduction=capture_pb2.REDUCTION_MEAN))
    client.append([frame(form, [0, 1, 2], [PROMPT - 1]), frame(form, [0, 1, 2], [7, 8, 9], seed=1)])
    assert cells_of(client.get().present) == grid(LAYERS, [PROMPT - 1, 7, 8, 9])
    manifest = client.seal(generated=[LENGTH - PROMPT + 1])
    assert manifest.state == COMPLETE
    assert cells_of(manifest.present) == grid(LAYERS, [PROMPT - 1, LENGTH - 1])
    assert manifest.num_rows == 2 * len(LAYERS)
    assert stored(client).keys() == {(layer, position) for layer in LAYERS for position in (PROMPT - 1, LENGTH - 1)}


def test_a_reduced_encoding_is_open_until_its_last_row_is_there(client: Client) -> None:
    form = FORMATS["fp32"]
    positions = selection_pb2.PositionSelection(phases=[selection_pb2.PHASE_GENERATED], every=4)
    client.open(describe_format(form, reduction=capture_pb2.REDUCTION_SUM, positions=positions))
    assert client.seal(generated=[20]).state == capture_pb2.CAPTURE_STATE_OPEN  # 25 rows: position 24 is the last
    client.append([frame(form, [0, 1], [20, 24])])
    manifest = client.get()
    assert cells_of(manifest.present) == grid([0, 1], [24])
    assert cells_of(manifest.missing) == grid([2], [24])
    client.append([frame(form, [2], [24])])
    assert client.get().state == COMPLETE
    assert client.get().missing == []
    assert {item.site for item in client.get().present} == {POST}
