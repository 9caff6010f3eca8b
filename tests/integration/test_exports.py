"""Captures of a real model, exported in each format and streamed to a training loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import residuum
from residuum.cli import main
from tests.client.support.opened import OPENERS

if TYPE_CHECKING:
    from svc_common.launcher import Service

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]


@pytest.mark.parametrize("kind", list(OPENERS))
def test_exports_of_a_real_capture(
    client: residuum.Client, services: tuple[Service, Service], tmp_path: Path, kind: str
) -> None:
    reply = client.generate(
        "The capital of France is", max_tokens=40, ignore_eos=True, capture=residuum.Capture(layers="all")
    )
    path = tmp_path / f"paris.{kind}"
    arguments = [reply.request_id, "--out", str(path), "--format", kind, "--layers", "0-29"]
    assert main(["pull", *arguments, "--endpoint", services[1].endpoint]) == 0
    acts = client.activations(reply.request_id)
    found, manifest = OPENERS[kind](path)
    one = found["resid_post"]
    assert manifest["request_id"] == reply.request_id
    assert manifest["sequences"]["0"]["layers"]["29"]["shape"] == [len(reply.prompt_token_ids) + 39, 576]
    assert one.token_ids == [*reply.prompt_token_ids, *reply.token_ids][:-1]
    assert sorted(one.rows) == list(range(30))
    for layer, rows in one.rows.items():
        assert np.array_equal(rows, acts[layer])


@pytest.mark.parametrize(("encoding", "width"), [("full8", 576), ("rp8", 512)])
def test_exports_of_a_real_encoded_capture(client: residuum.Client, tmp_path: Path, encoding: str, width: int) -> None:
    capture = residuum.Capture(layers=[3, 20], encoding=encoding)
    reply = client.generate("The capital of France is", max_tokens=40, ignore_eos=True, capture=capture)
    acts, count = client.activations(reply), len(reply.prompt_token_ids) + 39
    client.export(reply, tmp_path / "paris.npz")
    with np.load(tmp_path / "paris.npz") as file:
        q, scale, zero = (file[f"resid_post.20.{field}"] for field in ("q", "scale", "zero"))
    assert (q.dtype, q.shape, scale.shape) == (np.uint8, (count, width), (count,))
    np.testing.assert_allclose(scale[:, None] * q + zero[:, None], acts[20], rtol=1e-5)
    client.export(reply, tmp_path / "paris.parquet")
    found, manifest = OPENERS["parquet"](tmp_path / "paris.parquet")
    assert np.array_equal(found["resid_post"].rows[20], acts[20])
    assert manifest["mode"] == encoding
    assert manifest["sequences"]["0"]["layers"]["20"]["shape"] == [count, width]


def test_the_manifest_export_of_a_real_capture(
    client: residuum.Client, services: tuple[Service, Service], capsys: pytest.CaptureFixture[str]
) -> None:
    reply = client.generate("Hello", max_tokens=3, capture=residuum.Capture(layers=[0, 7]))
    assert main(["manifest", reply.request_id, "--wait", "--endpoint", services[1].endpoint]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "CAPTURE_STATE_COMPLETE"
    assert list(document["sequences"]["0"]["layers"]) == ["0", "7"]


def test_an_autoencoder_learns_from_exported_rows(services: tuple[Service, Service]) -> None:
    from examples.sae_data import run

    missed = run(services[1].endpoint, layer=15, sites="resid_post", tokens=64, epochs=12, workers=2)
    assert all(0 < part < 2 for part in missed)
    assert missed[-1] < 0.5 * missed[0]
    assert missed[-1] < 0.3


def test_a_transcoder_learns_from_streamed_rows(services: tuple[Service, Service]) -> None:
    from examples.sae_data import run

    missed = run(services[1].endpoint, layer=15, sites="mlp_in,mlp_out", tokens=64, epochs=12, workers=0)
    assert missed[-1] < 0.5 * missed[0]
