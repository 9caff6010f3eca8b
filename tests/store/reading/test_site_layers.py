"""A capture with different layers at each site, from a writer through the store to a person's files."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import residuum
from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2, store_pb2
from tests.store.support import (
    COMPLETE,
    INCOMPLETE,
    OPEN,
    POST,
    Cell,
    Client,
    cells_of,
    describe,
    failing_with,
    grid,
    loss_message,
    make_chunk,
    rejections,
    row,
)

INVALID = Reason.ERROR_REASON_INVALID_FIELD
MID, ACT = capture_pb2.SITE_RESID_MID, capture_pb2.SITE_MLP_ACT
LAYERS = {POST: (1, 4), MID: (4,), ACT: (0, 2, 4)}
NAMES = {POST: "resid_post", MID: "resid_mid", ACT: "mlp_act"}
WIDTHS = {POST: 4, MID: 4, ACT: 6}
POSITIONS = range(5)


def description(*layers: tuple[int, ...], sites: tuple[int, ...] = tuple(LAYERS)) -> capture_pb2.CaptureDescription:
    union = sorted({layer for of_site in LAYERS.values() for layer in of_site})
    made = describe(layers=union, sites=sites)
    made.num_layers = 6
    made.site_widths.extend(WIDTHS[site] for site in sites)
    for of_site in layers:
        made.spec.site_layers.add().list.layers.extend(of_site)
    return made


def chunks() -> list[bytes]:
    return [make_chunk(layers, POSITIONS, site=site, width=WIDTHS[site]) for site, layers in LAYERS.items()]


def everything(*layers: int) -> set[Cell]:
    """Return all cells of the capture, or those of some layers."""
    cells = set().union(*(grid(of_site, POSITIONS, site=site) for site, of_site in LAYERS.items()))
    return {cell for cell in cells if not layers or cell[2] in layers}


@pytest.fixture
def stored(client: Client) -> Client:
    """A store that has the capture."""
    client.open(description(*LAYERS.values()))
    assert not rejections(client.append(chunks()))
    assert client.seal().state == COMPLETE
    return client


@pytest.fixture
def reader(stored: Client) -> Iterator[residuum.Client]:
    with residuum.Client(store=stored.target) as made:
        yield made


def test_it_is_complete_with_the_layers_of_each_site(stored: Client) -> None:
    manifest = stored.get()
    assert cells_of(manifest.present) == everything()
    assert (list(manifest.missing), manifest.num_rows) == ([], len(everything()))
    for layers in ((), (4,), (0, 1), (2, 4)):
        assert stored.read(layers=layers)[0] == everything(*layers)
    assert stored.read(sites=[MID], layers=[1])[0] == set()


def test_rows_at_other_layers_are_refused(client: Client) -> None:
    client.open(description(*LAYERS.values()))
    wrong = [make_chunk((1,), POSITIONS, site=MID), make_chunk((0, 1), POSITIONS, site=ACT, width=6)]
    assert rejections(client.append([*wrong, *chunks()])) == {1: INVALID, 2: INVALID}
    for sites, layers, refused in (([POST], [4], False), ([MID, ACT], [4], False), ([POST, MID], [1], True)):
        reason = capture_pb2.INCOMPLETE_REASON_OVERFLOW
        loss = store_pb2.RowLoss(sites=sites, layers=layers, positions=[5], reason=reason)
        assert bool(rejections(client.send([loss_message(1, "a", loss)]))) == refused
    assert client.get().state == OPEN


def test_only_its_own_rows_can_be_missing(client: Client) -> None:
    client.open(description(*LAYERS.values()))
    client.append(chunks()[:2])
    reason = capture_pb2.INCOMPLETE_REASON_WRITE_FAILED
    loss = store_pb2.RowLoss(sites=[ACT], layers=LAYERS[ACT], positions=POSITIONS, reason=reason)
    client.send([loss_message(1, "a", loss)])
    manifest = client.seal()
    assert manifest.state == INCOMPLETE
    assert cells_of(manifest.missing) == grid(LAYERS[ACT], POSITIONS, site=ACT)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(1, 4), (4,)], "an entry for each of 3 sites, not 2"),
        ([(1, 4), (4,), (2, 4)], "have description.spec.layers as their union"),
        ([(1, 4), (4,), (0, 2, 4, 5)], "have description.spec.layers as their union"),
        ([(1, 4), (4, 1), (0, 2, 4)], "must be distinct and ascend"),
        ([(1, 4), (), (0, 2, 4)], "name at least one layer"),
        ([(1, 4), (6,), (0, 2, 4)], "layer 6 does not exist"),
    ],
)
def test_wrong_layers_are_refused(client: Client, layers: list[tuple[int, ...]], message: str) -> None:
    with failing_with(INVALID) as caught:
        client.open(description(*layers))
    assert message in caught[0].message


def test_each_site_is_read_with_its_layers(reader: residuum.Client) -> None:
    acts = reader.activations("a")
    assert acts.manifest.layers == (0, 1, 2, 4)
    for site, name in NAMES.items():
        of_site = acts.select(site=name)
        assert of_site.layers == tuple(of_site) == LAYERS[site] == acts.manifest.layers_at(name)
        for layer in LAYERS[site]:
            expected = [row((0, site, layer, position), WIDTHS[site]) for position in POSITIONS]
            np.testing.assert_array_equal(acts.at(f"{name}.{layer}"), expected)
            np.testing.assert_array_equal(of_site[layer], expected)
    with pytest.raises(KeyError, match=r"layer 1 is not in these activations; choose among \[4\]"):
        acts.at("blocks.1.hook_resid_mid")
    with pytest.raises(residuum.InvalidRequest, match="names several layers"):
        acts.at("resid_post.1-2")


def test_some_layers_are_read_where_they_are(reader: residuum.Client) -> None:
    acts = reader.activations("a", layers=[0, 1])
    assert {site: acts.select(site=site).layers for site in acts.sites} == {"resid_post": (1,), "mlp_act": (0,)}
    with pytest.raises(residuum.InvalidRequest, match=r"none of the layers \[0, 1\] at resid_mid; there it has \[4\]"):
        reader.activations("a", layers=[0, 1], sites=["resid_mid"])
    pieces = {(piece.site, piece.layer) for piece in reader.follow("a")}
    assert pieces == {(NAMES[site], layer) for site, layers in LAYERS.items() for layer in layers}
    (many,) = reader.activations(["a"], layers=[4])
    assert [many.select(site=site).layers for site in many.sites] == [(4,)] * 3


def test_the_manifest_as_json_has_the_shapes_of_these_rows(reader: residuum.Client) -> None:
    manifest = reader.manifest("a")
    layers = manifest.to_dict()["sequences"]["0"]["layers"]
    assert {layer: list(shapes["sites"]) for layer, shapes in layers.items()} == {
        "0": ["mlp_act"], "1": ["resid_post"], "2": ["mlp_act"], "4": ["resid_post", "resid_mid", "mlp_act"]
    }  # fmt: skip
    assert residuum.Manifest.from_json(manifest.to_json()) == manifest


def test_it_survives_a_file(reader: residuum.Client, tmp_path: Path) -> None:
    made = reader.export("a", tmp_path / "a.safetensors", progress=False)
    assert made.layers == (0, 1, 2, 4)
    acts, again = reader.activations("a"), residuum.Activations.from_safetensors(made.path)
    for site in NAMES.values():
        assert again.select(site=site).layers == acts.select(site=site).layers
        np.testing.assert_array_equal(again.select(site=site).stack(), acts.select(site=site).stack())


def test_other_formats_have_the_same_rows(reader: residuum.Client, tmp_path: Path) -> None:
    zarr, parquet = pytest.importorskip("zarr"), pytest.importorskip("pyarrow.parquet")
    reader.export("a", tmp_path / "a.zarr", progress=False)
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")
    reader.export("a", tmp_path / "a.parquet", sites=["resid_post", "resid_mid"], progress=False)
    table = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    found = set(zip(table["site"], table["layer"], strict=True))
    assert found == {("resid_post", 1), ("resid_post", 4), ("resid_mid", 4)}
    acts = reader.activations("a")
    for name in NAMES.values():
        assert group[name].attrs["layers"] == list(acts.select(site=name).layers)
        np.testing.assert_array_equal(group[name]["activations"][:], acts.select(site=name).stack())


def test_a_dataset_reads_its_rows(stored: Client) -> None:
    pytest.importorskip("torch")
    torch = importlib.import_module("residuum.torch")
    options = {"store": stored.target, "batch_size": 64, "shuffle_buffer": 0, "sites": ["resid_post", "resid_mid"]}
    (batch,) = torch.ActivationDataset("", ["a"], **options)
    assert len(batch.activations) == 3 * len(POSITIONS)
    aligned = torch.ActivationDataset("", ["a"], aligned=True, **options)
    assert aligned.places == (("resid_post", 1), ("resid_post", 4), ("resid_mid", 4))
    (batch,) = aligned
    expected = [
        [row((0, site, layer, position)) for site, layer in ((POST, 1), (POST, 4), (MID, 4))] for position in POSITIONS
    ]
    np.testing.assert_array_equal(batch.activations.numpy(), expected)
    with pytest.raises(residuum.InvalidRequest, match=r"none of the layers \[1\] at resid_mid"):
        torch.ActivationDataset("", ["a"], layers=[1], **{**options, "sites": ["resid_mid"]})
