"""A filter of an admin may select captures of any tenant. These are read and deleted, not others with the same IDs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import residuum
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.labels import to_label
from residuum.wire.rows.frames import append_prefix
from tests.store.support import Client, describe, make_chunk, serving

LAYERS = (0, 1)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Client]:
    """A store that gives everyone the rights of an admin. Two tenants have a capture with the same ID."""
    with serving(tmp_path / "store") as (_, plain):
        put(plain, "", "x", split="test", prompt=3)
        put(plain, "alice", "x", split="train", prompt=4)
        yield plain


def put(plain: Client, tenant: str, name: str, *, split: str, prompt: int) -> None:
    description = describe(name, layers=LAYERS, prompt=prompt)
    description.tenant = tenant
    description.spec.labels.append(to_label("split", split))
    plain.open(description)
    chunk = make_chunk(LAYERS, range(prompt))
    plain.send([append_prefix(1, name, len(chunk), tenant) + chunk])
    seal = store_pb2.SealCaptureRequest(capture_id=name, tenant=tenant, outcome=capture_pb2.CAPTURE_STATE_COMPLETE)
    seal.sequences.add(generated_token_ids=[1], finish_reason="stop")
    plain.stub.SealCapture(seal)


def owners(plain: Client) -> list[str]:
    return sorted(item.tenant for item in plain.stub.ListCaptures(store_pb2.ListCapturesRequest()).captures)


async def test_rows_are_those_of_the_selected_captures(make: Any, plain: Client) -> None:
    client = make(store=plain.target)
    rows = await client.rows(where="split = train", layer=1)
    assert (len(rows), set(rows.labels("split"))) == (4, {"train"})
    with pytest.raises(residuum.InvalidRequest, match=r"several tenants: '', 'alice'. Choose one: .*tenant='alice'"):
        await client.rows(prefix="x", layer=1)
    assert len(await make(store=plain.target, tenant="").rows(prefix="x", layer=1)) == 3


async def test_the_selected_captures_are_deleted(make: Any, plain: Client) -> None:
    client = make(store=plain.target)
    with pytest.raises(residuum.InvalidRequest, match="several tenants"):
        await client.delete(prefix="x")
    assert owners(plain) == ["", "alice"]
    assert await client.delete(where="split = train") > 0
    assert owners(plain) == [""]


def test_a_dataset_has_the_selected_captures(plain: Client) -> None:
    torch = pytest.importorskip("residuum.torch")
    dataset = torch.ActivationDataset(store=plain.target, where="split = train", layers=1, batch_size=64)
    assert sorted(np.concatenate([batch.positions for batch in dataset]).tolist()) == [0, 1, 2, 3]


def test_the_commands_pull_and_rm(plain: Client, tmp_path: Path) -> None:
    run(plain, "pull", "--where", "split = train", "--out", str(tmp_path))
    acts = residuum.Activations.from_safetensors(tmp_path / "x.safetensors")
    assert (len(acts.positions), acts.manifest.labels) == (4, {"split": "train"})
    run(plain, "rm", "--where", "split = train", "--yes")
    assert owners(plain) == [""]


def test_the_page_lists_what_it_reads_and_deletes(plain: Client, tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    from tests.client.ui.ui_page import Page

    page = Page(None, tmp_path / "gallery", store=plain.target)
    try:
        assert [item["labels"] for item in page("captures")["captures"]] == [{"split": "test"}]
        assert page("capture", id="x")["prompt_tokens"] == 3
        assert page("capture/delete", {"id": "x"})["freed"] > 0
    finally:
        page.stop()
    assert owners(plain) == ["alice"]


def run(plain: Client, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = [sys.executable, "-m", "residuum", *arguments, "--store", plain.target]
    subprocess.run(line, env=environment, check=True, timeout=60)
