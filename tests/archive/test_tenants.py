"""Captures of tenants in an archive: each reader sees those of one tenant, and errors name the others."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import residuum
from residuum.captures.archive_index import ArchiveIndex, Entry
from residuum.cli import main
from residuum.v1 import capture_pb2, store_pb2
from residuum.values.replies.capture_summaries import CaptureSummary
from tests.archive.support import LAYERS, capture, file_url, stats
from tests.store.support import POST, Client, describe, make_chunk, row, serving
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An archive with "same" of alice and bob, "only" of alice, and no capture of the default tenant."""
    return made(tmp_path_factory.mktemp("tenants"))


@pytest.fixture(scope="module")
def mixed_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same, with "mine" of the default tenant."""
    return made(tmp_path_factory.mktemp("mixed"), "mine")


def made(folder: Path, *names: str) -> str:
    with serving(folder / "store", archive=file_url(folder / "archive")) as (_, client):
        for name in names:
            capture(client, name)
        for tenant, name, prompt in (("alice", "same", 4), ("bob", "same", 6), ("alice", "only", 4)):
            of_tenant(client, tenant, name, prompt)
        wait_for(lambda: stats(client).captures_copied == 3 + len(names), "copies")
    return file_url(folder / "archive")


def of_tenant(client: Client, tenant: str, name: str, prompt: int) -> None:
    description = describe(name, layers=LAYERS, prompt=prompt)
    description.tenant = tenant
    client.stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description))
    frames = store_pb2.AppendChunksRequest(number=1, capture_id=name, tenant=tenant)
    frames.chunk.ParseFromString(make_chunk(LAYERS, range(prompt)))
    client.send([frames.SerializeToString()])
    outcome = capture_pb2.SequenceOutcome(generated_token_ids=[1], finish_reason="stop")
    client.stub.SealCapture(
        store_pb2.SealCaptureRequest(
            capture_id=name, tenant=tenant, sequences=[outcome], outcome=capture_pb2.CAPTURE_STATE_COMPLETE
        )
    )


def test_a_reader_sees_the_captures_of_its_tenant(mixed_url: str) -> None:
    for tenant, names, positions in (("", ["mine"], 4), ("alice", ["only", "same"], 4), ("bob", ["same"], 6)):
        archive = residuum.Archive(mixed_url, tenant=tenant)
        assert sorted(item.capture_id for item in archive.captures()) == names
        assert archive.activations(names[-1])[0].shape[0] == positions
        assert archive.tenants == ("", "alice", "bob")


@pytest.mark.parametrize(
    ("tenant", "name", "text"),
    [
        ("", "same", r"no capture same of the default tenant in .*The tenants alice, bob have .*this ID.*tenant="),
        ("bob", "only", r"no capture only of the tenant bob in .*The tenant alice has a capture with this ID"),
        ("", "none", r"The tenants alice, bob have captures there. Choose one with tenant= \(--tenant\)\."),
        ("carol", "none", r"The tenants alice, bob have captures there"),
        ("alice", "none", r"no capture none of the tenant alice in .*never copied there, or was deleted"),
    ],
)
def test_an_unknown_capture_says_which_tenants_have_it(url: str, tenant: str, name: str, text: str) -> None:
    archive = residuum.Archive(url, tenant=tenant)
    for call in (archive.manifest, archive.activations, lambda name: archive.activations([name])):
        with pytest.raises(residuum.UnknownCapture, match=text):
            call(name)


def test_the_default_tenant_is_named(mixed_url: str) -> None:
    with pytest.raises(residuum.UnknownCapture, match=r"The default tenant has a capture.*Leave out tenant="):
        residuum.Archive(mixed_url, tenant="alice").manifest("mine")
    with pytest.raises(residuum.UnknownCapture, match=r"alice, bob and the default tenant have.*or leave it out"):
        residuum.Archive(mixed_url, tenant="carol").manifest("none")
    with pytest.raises(residuum.UnknownCapture, match="never copied there"):
        residuum.Archive(mixed_url).manifest("none")


def test_a_filter_that_finds_nothing_names_the_tenants(url: str) -> None:
    text = r"no capture of the default tenant whose ID starts with 's' in .*The tenants alice, bob have captures"
    with pytest.raises(residuum.InvalidRequest, match=text):
        residuum.Archive(url).rows(prefix="s", layer=0)


def test_an_invalid_tenant_is_refused(url: str) -> None:
    with pytest.raises(residuum.InvalidRequest, match="'a/b' is not a valid tenant name"):
        residuum.Archive(url, tenant="a/b")


def test_torch_reads_a_tenant(url: str) -> None:
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    data = ActivationDataset(store=url, layers=[1], prefix="sa", tenant="bob")
    total = sum(batch.activations.double().sum().item() for batch in data)
    assert total == float(np.sum([row((0, POST, 1, at)) for at in range(6)], dtype=np.float64))
    with pytest.raises(residuum.InvalidRequest, match="The tenants alice, bob have captures"):
        ActivationDataset(store=url, layers=[1])
    with pytest.raises(residuum.UnknownCapture, match="The tenant alice has a capture"):
        ActivationDataset(store=url, layers=[1], captures=["only"], tenant="bob")
    with pytest.raises(residuum.InvalidRequest, match=r"is not an endpoint.*only a store, with store="):
        ActivationDataset(layers=[1])


def test_torch_reads_a_tenant_of_a_store(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset

    with serving(tmp_path / "store") as (_, client):
        of_tenant(client, "alice", "same", 4)
        of_tenant(client, "bob", "same", 6)
        for tenant, rows in (("alice", 4), ("bob", 6)):
            (batch,) = ActivationDataset(store=client.target, captures=["same"], layers=[0], tenant=tenant)
            assert len(batch.activations) == rows


def test_the_commands_name_the_tenants(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--store", url]) == 0
    assert "the archive has captures of the tenants alice, bob: choose one with --tenant" in capsys.readouterr().err
    assert main(["pull", "--prefix", "s", "--store", url, "--out", str(tmp_path)]) == 0
    assert "captures of the tenants alice, bob" in capsys.readouterr().err
    assert main(["manifest", "only", "--store", url]) == 1
    assert "The tenant alice has a capture with this ID. Choose one with tenant= (--tenant)" in capsys.readouterr().err
    assert main(["manifest", "only", "--store", url, "--tenant", "alice"]) == 0


def test_a_copy_in_another_process_has_no_ids_of_other_tenants() -> None:
    index = ArchiveIndex("bob")
    for tenant, name in (("alice", "theirs"), ("bob", "mine")):
        summary = CaptureSummary(name, "tiny", "complete", 1, 1, None, None, tenant=tenant)
        index.add(Entry(name, (0, 0), summary))
    data = pickle.dumps(index)
    assert b"mine" in data
    assert b"theirs" not in data
    assert pickle.loads(data).tenants == ["alice", "bob"]
