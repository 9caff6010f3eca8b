"""A capture whose sites have rows of different widths, from a writer through the store to a person's files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import residuum
from residuum.rpc.errors import Reason
from residuum.v1 import capture_pb2
from tests.store.support import POST, Client, describe, failing_with, make_chunk, rejections, row

INVALID = Reason.ERROR_REASON_INVALID_FIELD
K, ACT = capture_pb2.SITE_K, capture_pb2.SITE_MLP_ACT
WIDTHS = {POST: 8, K: 2, ACT: 20}
NAMES = {POST: "resid_post", K: "k", ACT: "mlp_act"}
LAYERS, POSITIONS = (0, 2), range(5)


def description(*widths: int, sites: tuple[int, ...] = tuple(WIDTHS)) -> capture_pb2.CaptureDescription:
    made = describe(layers=LAYERS, sites=sites, width=8)
    made.site_widths.extend(widths)
    return made


def expected(site: int) -> np.ndarray:
    """Return the rows of a site, float32 [layers, positions, width]."""
    return np.array([[row((0, site, layer, position), WIDTHS[site]) for position in POSITIONS] for layer in LAYERS])


@pytest.fixture
def reader(client: Client) -> Iterator[residuum.Client]:
    """A client of a store that has a capture of three widths."""
    client.open(description(*WIDTHS.values()))
    chunks = [make_chunk(LAYERS, POSITIONS, site=site, width=width) for site, width in WIDTHS.items()]
    assert not rejections(client.append(chunks))
    client.seal()
    with residuum.Client(store=client.target) as made:
        yield made


def test_each_site_has_its_width(reader: residuum.Client) -> None:
    acts = reader.activations("a")
    assert acts.manifest.is_complete
    for site, name in NAMES.items():
        of_site = acts.select(site=name)
        assert (of_site.width, of_site.hidden_size) == (WIDTHS[site], 8)
        assert acts.manifest.format_at(name).width == WIDTHS[site]
        np.testing.assert_array_equal(of_site.stack(), expected(site))
    shapes = acts.manifest.to_dict()["sequences"]["0"]["layers"]["2"]["sites"]
    assert {name: shape["shape"] if isinstance(shape, dict) else shape for name, shape in shapes.items()} == {
        name: [5, WIDTHS[site]] for site, name in NAMES.items()
    }


def test_directions_are_made_from_the_stream_only(reader: residuum.Client) -> None:
    acts = reader.activations("a")
    with pytest.raises(residuum.InvalidRequest, match="rows at k are not in the space of the residual stream"):
        residuum.directions.difference_of_means([acts.select(site="k")], [acts.select(site="k")])


def test_the_format_of_a_site_that_was_not_captured_is_not_known(reader: residuum.Client) -> None:
    with pytest.raises(ValueError, match="is not known"):
        reader.manifest("a").format_at("z")


def test_a_file_keeps_every_width(reader: residuum.Client, tmp_path: Path) -> None:
    acts = reader.activations("a")
    acts.to_safetensors(tmp_path / "x.safetensors")
    back = residuum.Activations.from_safetensors(tmp_path / "x.safetensors")
    made = reader.export("a", tmp_path / "y.safetensors")
    assert str(made).endswith("2 layers × 5 positions × 8 or 2 or 20, sites resid_post, k, mlp_act")
    for site, name in NAMES.items():
        np.testing.assert_array_equal(back.select(site=name).stack(), expected(site))


def test_a_table_has_one_width(reader: residuum.Client, tmp_path: Path) -> None:
    with pytest.raises(residuum.InvalidRequest, match=r"different ones: resid_post 8, k 2, mlp_act 20\. Take"):
        reader.export("a", tmp_path / "x.parquet")
    reader.export("a", tmp_path / "x.parquet", sites="mlp_act")


def test_a_dataset_has_one_width(reader: residuum.Client, client: Client) -> None:
    pytest.importorskip("torch")
    torch = importlib.import_module("residuum.torch")
    dataset = torch.ActivationDataset("127.0.0.1:1", ["a"], store=client.target, sites="mlp_act", batch_size=4)
    assert dataset.width == 20
    assert sum(len(batch.activations) for batch in dataset) == len(LAYERS) * len(POSITIONS)
    with pytest.raises(residuum.InvalidRequest, match="different numbers of elements: resid_post 8, k 2, mlp_act 20"):
        torch.ActivationDataset("127.0.0.1:1", ["a"], store=client.target)


@pytest.mark.parametrize("widths", [(8, 2), (8, 2, 0), (8, 2, 20, 4)])
def test_a_width_is_needed_for_each_site(client: Client, widths: tuple[int, ...]) -> None:
    with failing_with(INVALID) as failure:
        client.open(description(*widths))
    assert failure[0].metadata == {"field": "description.site_widths"}


def test_a_chunk_must_have_the_width_of_its_site(client: Client) -> None:
    client.open(description(*WIDTHS.values()))
    answers = client.append([make_chunk([0], [0], site=K, width=8), make_chunk([0], [0], site=POST, width=8)])
    assert rejections(answers) == {1: INVALID}


def test_old_descriptions_have_the_width_of_the_stream_everywhere(client: Client) -> None:
    client.open(describe(sites=(POST, capture_pb2.SITE_MLP_OUT), width=8))
    chunks = [make_chunk((0, 1, 2), [0], site=site, width=8) for site in (POST, capture_pb2.SITE_MLP_OUT)]
    assert not rejections(client.append(chunks))
    manifest = residuum.Manifest.from_proto(client.get())
    assert {manifest.format_at(site).width for site in manifest.sites} == {8}
    assert json.loads(manifest.to_json())
