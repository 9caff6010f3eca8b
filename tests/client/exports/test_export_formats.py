"""Exports of captures. Each format, opened with its own library, has every row and lists missing rows."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pyarrow.parquet
import pytest
import zarr

import residuum
from residuum import cli as command_line
from residuum.exports.formats import FORMATS, Format
from tests.client.support.captured import activations
from tests.client.support.disks import no_file_above
from tests.client.support.flaky_store import Unknown
from tests.client.support.opened import OPENERS
from tests.client.support.peer import HIDDEN, POST, PRE, rows

SITES = {"resid_post": POST, "resid_pre": PRE}


@pytest.fixture(params=list(OPENERS))
def kind_of_file(request):
    return request.param


@pytest.fixture
async def reply(client):
    capture = residuum.Capture(layers=[1, 4], sites=("resid_post", "resid_pre"))
    return await client.generate("a bb ccc", max_tokens=40, n=2, capture=capture)


async def test_an_export_has_every_row(client, reply, tmp_path, kind_of_file):
    path = tmp_path / f"x.{kind_of_file}"
    made = await client.export(reply, path)
    assert (made.path, made.format, made.manifest.state) == (path, kind_of_file, "complete")
    assert (made.layers, made.sites, made.sequences) == ((1, 4), ("resid_post", "resid_pre"), (0, 1))
    assert (made.num_positions, made.num_rows, made.num_missing) == (42, 42 * 2 * 2 * 2, 0)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    found, manifest = OPENERS[kind_of_file](path)
    assert manifest == made.manifest.to_dict()
    assert sorted(found) == ["resid_post", "resid_pre", "sequence1/resid_post", "sequence1/resid_pre"]
    for sequence, outcome in enumerate(reply.sequences):
        for site, number in SITES.items():
            one = found[(f"sequence{sequence}/" if sequence else "") + site]
            assert one.positions == list(range(42))
            assert one.token_ids == [*reply.prompt_token_ids, *outcome.token_ids][:-1]
            assert one.present is None
            assert list(one.rows) == [1, 4]
            for layer, values in one.rows.items():
                assert np.array_equal(values, rows(sequence, number, layer, range(42)).astype(np.float32))


async def test_an_export_has_only_the_selected_rows(client, reply, tmp_path, kind_of_file):
    path = tmp_path / f"x.{kind_of_file}"
    chosen = {"layers": [4], "sites": "resid_pre", "sequences": 1, "positions": [0, 2, 3, 41]}
    made = await client.export(reply, path, **chosen)
    assert (made.num_positions, made.num_rows) == (4, 4)
    found, _ = OPENERS[kind_of_file](path)
    assert list(found) == ["sequence1/resid_pre"]
    assert found["sequence1/resid_pre"].positions == [0, 2, 3, 41]
    assert np.array_equal(found["sequence1/resid_pre"].rows[4], rows(1, PRE, 4, [0, 2, 3, 41]).astype(np.float32))


async def test_an_export_of_an_incomplete_capture_says_what_is_missing(client, peer, tmp_path, kind_of_file):
    peer.script.lost_layers = (1,)
    reply = await client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[1, 4]))
    path = tmp_path / f"x.{kind_of_file}"
    with pytest.raises(residuum.IncompleteCapture, match="OVERFLOW"):
        await client.export(reply, path)
    assert not list(tmp_path.iterdir())
    made = await client.export(reply, path, allow_partial=True)
    assert (made.num_rows, made.num_missing, made.manifest.state) == (6, 6, "incomplete")
    assert "6 rows missing (resid_post, layers 1, sequence 0: positions 0-5)" in str(made)
    found, manifest = OPENERS[kind_of_file](path)
    one = found["resid_post"]
    assert manifest["missing"][0]["layers"] == [1]
    if kind_of_file == "parquet":
        assert list(one.rows) == [4]
    else:
        assert one.present.tolist() == [[False] * 6, [True] * 6]
        assert np.isnan(one.rows[1]).all()
    assert np.array_equal(one.rows[4], rows(0, POST, 4, range(6)).astype(np.float32))


def test_missing_rows_in_an_export_are_not_zeros(tmp_path, kind_of_file):
    """Rows of several layers that are missing here and there, from memory."""
    values = np.arange(1, 2 * 5 * 3 + 1, dtype=np.float32).reshape(2, 5, 3)
    present = np.array([[True, False, True, True, False], [True, True, False, True, True]])
    acts = activations(values, present=present, state="incomplete", generated=1)
    path = tmp_path / f"x.{kind_of_file}"
    made = acts.export(path)
    assert (made.num_rows, made.num_missing) == (7, 3)
    one = OPENERS[kind_of_file](path)[0]["resid_post"]
    assert one.positions == [0, 1, 2, 3, 4]
    expected = np.where(present[..., None], values, np.nan).astype(np.float32)
    assert np.array_equal(np.stack(list(one.rows.values())), expected, equal_nan=True)
    if kind_of_file != "parquet":
        assert np.array_equal(one.present, present)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_an_export_can_convert_dtypes(tmp_path, kind_of_file, dtype):
    values = np.linspace(-3, 3, 2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    path = tmp_path / f"x.{kind_of_file}"
    activations(values, dtype=dtype).export(path)
    one = OPENERS[kind_of_file](path)[0]["resid_post"]
    assert np.array_equal(np.stack(list(one.rows.values())), values.astype(dtype).astype(np.float32))


def test_dtypes_in_exports(tmp_path):
    """safetensors keeps bfloat16. The other formats' readers do not support it, so those use float32. float16 stays."""
    for dtype, kept in ((ml_dtypes.bfloat16, np.float32), (np.float16, np.float16)):
        acts = activations(np.ones((1, 2, 4)), dtype=dtype)
        for name in ("npz", "zarr", "parquet"):
            acts.export(tmp_path / f"x.{name}", overwrite=True)
        assert np.load(tmp_path / "x.npz")["resid_post.0"].dtype == kept
        assert zarr.open_group(tmp_path / "x.zarr", mode="r")["resid_post/activations"].dtype == kept
        item = pyarrow.parquet.read_schema(tmp_path / "x.parquet").field("activation").type
        assert (item.value_type.to_pandas_dtype(), item.list_size) == (kept, 4)


def test_parquet_exports_of_float16_have_only_encodings_that_all_readers_know(tmp_path):
    """DuckDB and older readers know BYTE_STREAM_SPLIT of float32, but not of float16."""
    for dtype, is_split in ((np.float16, False), (np.float32, True)):
        activations(np.ones((1, 2, 4)), dtype=dtype).export(tmp_path / "x.parquet", overwrite=True)
        group = pyarrow.parquet.ParquetFile(tmp_path / "x.parquet").metadata.row_group(0)
        (column,) = (
            group.column(number)
            for number in range(group.num_columns)
            if group.column(number).path_in_schema.startswith("activation")
        )
        assert ("BYTE_STREAM_SPLIT" in column.encodings) == is_split


async def test_exports_from_memory_and_from_the_store_are_the_same(client, reply, tmp_path):
    acts = await client.activations(reply)
    for name in ("npz", "safetensors", "parquet"):
        acts.export(tmp_path / f"memory.{name}")
        await client.export(reply, tmp_path / f"store.{name}")
        if name == "npz":  # a zip has times in it
            memory, store = (np.load(tmp_path / f"{where}.npz") for where in ("memory", "store"))
            assert memory.files == store.files
            assert all(np.array_equal(memory[key], store[key]) for key in memory.files)
        else:
            assert (tmp_path / f"memory.{name}").read_bytes() == (tmp_path / f"store.{name}").read_bytes()


@pytest.mark.parametrize("encoding", ["raw", "rp8", "full8"])
async def test_the_progress_of_an_export_reaches_its_total(client, tmp_path, kind_of_file, encoding):
    capture = residuum.Capture(layers=[1, 4], encoding=encoding, dimensions=4 if encoding == "rp8" else None)
    acts = await client.activations(await client.generate("a bb ccc", max_tokens=40, capture=capture))
    steps = []
    FORMATS[kind_of_file].writer()(acts, tmp_path / "x", steps.append)
    assert acts.nbytes - len(steps) <= sum(steps) <= acts.nbytes
    assert min(steps) >= 0


async def test_zarr_exports_are_chunked_by_block_and_sharded(client, reply, tmp_path):
    await client.export(reply, tmp_path / "x.zarr")
    metadata = json.loads((tmp_path / "x.zarr/resid_post/activations/zarr.json").read_text())
    assert (metadata["zarr_format"], metadata["shape"]) == (3, [2, 42, HIDDEN])
    assert metadata["dimension_names"] == ["layer", "position", "width"]
    (sharding,) = metadata["codecs"]
    assert sharding["name"] == "sharding_indexed"
    assert sharding["configuration"]["chunk_shape"] == [1, 32, HIDDEN]
    assert {codec["name"] for codec in sharding["configuration"]["codecs"]} == {"bytes", "blosc"}
    shards = [path for path in (tmp_path / "x.zarr/resid_post/activations/c").rglob("*") if path.is_file()]
    assert len(shards) == 2, "one for each layer"


async def test_parquet_exports_let_readers_skip_layers(client, reply, tmp_path):
    await client.export(reply, tmp_path / "x.parquet")
    file = pyarrow.parquet.ParquetFile(tmp_path / "x.parquet")
    layer = file.schema_arrow.get_field_index("layer")
    groups = [file.metadata.row_group(index).column(layer).statistics for index in range(file.num_row_groups)]
    assert [(group.min, group.max) for group in groups] == [(1, 1), (4, 4)] * 4
    table = pyarrow.parquet.read_table(tmp_path / "x.parquet", filters=[("layer", "=", 4), ("sequence", "=", 1)])
    assert table.num_rows == 84


async def test_hugging_face_datasets_load_parquet_exports(client, reply, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))  # set before the import, which reads it
    import datasets

    await client.export(reply, tmp_path / "x.parquet", sites="resid_post", sequences=0)
    data = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "x.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert data.num_rows == 84
    last = data.with_format("numpy")[-1]
    assert (last["capture_id"], last["layer"], last["position"]) == (reply.request_id, 4, 41)
    assert np.array_equal(last["activation"], rows(0, POST, 4, [41])[0].astype(np.float32))
    assert last["activation"].dtype == np.float32


async def test_an_export_does_not_replace_an_existing_file(client, reply, tmp_path, kind_of_file):
    path = tmp_path / f"x.{kind_of_file}"
    await client.export(reply, path, layers=1)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        await client.export(reply, path)
    assert list(OPENERS[kind_of_file](path)[0]["resid_post"].rows) == [1]
    await client.export(reply, path, overwrite=True)
    assert list(OPENERS[kind_of_file](path)[0]["resid_post"].rows) == [1, 4]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


async def test_an_export_never_replaces_a_folder_with_other_content(client, reply, tmp_path, kind_of_file):
    path = tmp_path / "mine"
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="a folder, but not an export"):
        await client.export(reply, path, format=kind_of_file, overwrite=True)
    assert (path / "thesis.tex").read_text() == "years of work"


def test_an_export_never_replaces_a_device_or_a_pipe(tmp_path):
    path = tmp_path / "pipe.npz"
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="a device or a pipe"):
        activations(np.ones((1, 2, 4))).export(path, overwrite=True)
    assert path.is_fifo()


def test_an_export_replaces_a_link_and_not_its_target(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name, target in (("x.npz", "mine"), ("y.npz", "nowhere")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(FileExistsError):
            activations(np.ones((1, 2, 4))).export(tmp_path / name)
        activations(np.ones((1, 2, 4))).export(tmp_path / name, overwrite=True)
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"


async def test_an_export_keeps_the_permissions_of_what_it_replaces(client, reply, tmp_path):
    path = tmp_path / "x.npz"
    path.touch()
    path.chmod(0o640)
    await client.export(reply, path, overwrite=True)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("link", [False, True])
def test_an_export_that_cannot_be_moved_leaves_the_old_one(tmp_path, monkeypatch, error, link):
    """The old folder is moved aside first."""
    path = tmp_path / "x.zarr"
    activations(np.ones((1, 2, 4))).export(tmp_path / "y.zarr" if link else path)
    if link:
        path.symlink_to("y.zarr")
    before = sorted(tmp_path.rglob("*"))
    rename = Path.rename

    def fail_to_move(self, target):
        if self.name == "result":
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_to_move)
    with pytest.raises(error):
        activations(np.zeros((1, 2, 4))).export(path, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert path.is_symlink() == link
    assert (OPENERS["zarr"](path)[0]["resid_post"].rows[0] == 1).all()


async def test_an_export_without_disk_space_leaves_nothing(client, reply, tmp_path, kind_of_file):
    acts = await client.activations(reply)
    with no_file_above(100), pytest.raises(OSError, match=rf"x.{kind_of_file} cannot be written"):
        acts.export(tmp_path / f"x.{kind_of_file}")
    assert not list(tmp_path.iterdir())


async def test_an_export_detects_missing_disk_space_for_rows(client, reply, tmp_path):
    with no_file_above(100), pytest.raises(OSError, match="Cannot reserve 1344 bytes for rows"):
        await client.export(reply, tmp_path / "x.npz")
    assert not list(tmp_path.iterdir())


async def test_an_interrupted_read_of_an_export_is_resumed(make, endpoint, flaky, reply, tmp_path, kind_of_file):
    def change(number, messages):
        yield from messages[: 2 + number]
        if number < 3:
            raise Unknown(grpc.StatusCode.UNAVAILABLE)
        yield from messages[2 + number :]

    flaky.change = change
    path = tmp_path / f"x.{kind_of_file}"
    await make(endpoint, store=flaky.endpoint, timeout=10).export(reply, path)
    assert flaky.reads == 4
    found, _ = OPENERS[kind_of_file](path)
    assert np.array_equal(found["resid_post"].rows[4], rows(0, POST, 4, range(42)).astype(np.float32))


async def test_an_export_from_an_unreachable_store_leaves_nothing(make, endpoint, flaky, reply, tmp_path):
    def change(number, messages):
        yield from messages[:3]
        raise Unknown(grpc.StatusCode.DATA_LOSS)

    flaky.change = change
    with pytest.raises(residuum.ResiduumError):
        await make(endpoint, store=flaky.endpoint, timeout=10).export(reply, tmp_path / "x.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("times", [1, 2])
async def test_an_export_that_is_cancelled_leaves_nothing(endpoint, reply, tmp_path, monkeypatch, times):
    """The writing thread ends before its files are removed, also if all tasks are cancelled, and more than once."""
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def write(acts, path, advance):
        path.write_text("begun")
        began.set()
        go_on.wait(30)
        try:
            advance(1)
        finally:
            path.write_text("written late")  # this would fail, or leave a file, if the folder were already removed
            ended.set()

    monkeypatch.setattr("residuum.exports.formats.Format.writer", lambda _: write)
    async with residuum.AsyncClient(endpoint) as client:
        task = asyncio.ensure_future(client.export(reply, tmp_path / "x.npz"))
        assert await asyncio.to_thread(began.wait, 30)
        asyncio.get_running_loop().call_later(0.2, go_on.set)
        for _ in range(times):
            for each in asyncio.all_tasks() - {asyncio.current_task()}:
                each.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended.is_set()
    assert not list(tmp_path.iterdir())


async def test_an_export_of_an_open_capture(client, peer, tmp_path):
    peer.script.delay_seal = threading.Event()
    reply = await client.generate("a bb ccc", max_tokens=90, capture=residuum.Capture(layers=[1]))
    with pytest.raises(residuum.OpenCapture):
        await client.export(reply, tmp_path / "x.npz", wait=False)
    assert not list(tmp_path.iterdir())
    made = await client.export(reply, tmp_path / "x.npz", wait=False, allow_partial=True)
    assert (made.manifest.state, made.num_rows) == ("open", 92)
    peer.script.delay_seal.set()
    made = await client.export(reply, tmp_path / "x.npz", overwrite=True)
    assert (made.manifest.state, made.num_rows) == ("complete", 92)


async def test_an_export_begins_while_the_capture_is_open(client, peer, tmp_path):
    """The length is not known yet, so the arrays grow."""
    peer.script.delay_seal = threading.Event()
    reply = await client.generate("a bb ccc", max_tokens=300, capture=residuum.Capture(layers=[1]))
    timer = threading.Timer(0.3, peer.script.delay_seal.set)
    timer.start()
    await client.export(reply, tmp_path / "x.npz")
    timer.join()
    found, _ = OPENERS["npz"](tmp_path / "x.npz")
    assert np.array_equal(found["resid_post"].rows[1], rows(0, POST, 1, range(302)).astype(np.float32))


async def test_an_export_without_positions_is_refused(client, tmp_path, kind_of_file):
    reply = await client.generate("a bb", max_tokens=2, capture=residuum.Capture(positions=5000, layers=[1]))
    path = tmp_path / f"x.{kind_of_file}"
    with pytest.warns(residuum.EmptyCaptureWarning):
        made = await client.export(reply, path)
    assert made.num_rows == 0
    found, manifest = OPENERS[kind_of_file](path)
    assert manifest["request_id"] == reply.request_id
    if kind_of_file != "parquet":
        assert found["resid_post"].rows[1].shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("x.zarr", "zarr", "zarr"), ("x.parquet", "pyarrow", "parquet")]
)
async def test_an_export_names_the_extra_it_needs(client, reply, tmp_path, monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"extra '{extra}' \(from a checkout: pip install '\.\[{extra}\]'\)"):
        await client.export(reply, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x", "x.csv", "npz"])
async def test_an_export_without_a_format_is_refused(client, tmp_path, name):
    with pytest.raises(residuum.InvalidRequest, match=r"\.safetensors, \.npz, \.zarr, \.parquet"):
        await client.export("never-asked-for", tmp_path / name)


async def test_an_unknown_export_format_is_refused(client, tmp_path):
    with pytest.raises(residuum.InvalidRequest, match="'csv' is not an export format"):
        await client.export("never-asked-for", tmp_path / "x.npz", format="csv")


async def test_an_export_into_a_missing_folder_fails(client, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cannot be written: the folder .* does not exist"):
        await client.export("never-asked-for", tmp_path / "none" / "x.npz")


async def test_an_export_of_an_unknown_capture_fails(client, tmp_path):
    with pytest.raises(residuum.UnknownCapture):
        await client.export("never-was", tmp_path / "x.npz")
    assert not list(tmp_path.iterdir())


def test_the_command_exports_in_every_format(cli, captured, tmp_path, kind_of_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("pull", captured, "--format", kind_of_file)
    assert (code, err) == (0, "")
    assert out.startswith(f"{captured}.{kind_of_file}: {captured} as {kind_of_file}, complete: 2 layers × 6 positions")
    found, _ = OPENERS[kind_of_file](tmp_path / f"{captured}.{kind_of_file}")
    assert np.array_equal(found["resid_post"].rows[4], rows(0, POST, 4, range(6)).astype(np.float32))


def test_the_command_takes_the_format_of_an_export_from_its_name(cli, captured, tmp_path):
    path = tmp_path / "x.npz"
    facts = json.loads(cli("pull", captured, "--out", path, "--json")[1])
    assert (facts["format"], facts["shape"], facts["missing_rows"]) == ("npz", [2, 6, HIDDEN], 0)
    assert OPENERS["npz"](path)[0]
    assert json.loads(cli("pull", captured, "--out", tmp_path / "x", "--json")[1])["format"] == "safetensors"
    assert (
        json.loads(cli("pull", captured, "--out", tmp_path / "y.npz", "--format", "zarr", "--json")[1])["format"]
        == "zarr"
    )


def test_the_command_replaces_an_export_only_with_force(cli, captured, tmp_path):
    path = tmp_path / "x.npz"
    path.write_text("mine")
    code, _, err = cli("pull", captured, "--out", path)
    assert code == 1
    assert "--force" in err
    assert path.read_text() == "mine"
    assert cli("pull", captured, "--out", path, "--force")[0] == 0
    assert OPENERS["npz"](path)[0]


def test_the_command_continues_when_it_exports_several_captures(cli, tmp_path, monkeypatch, kind_of_file):
    prefix, out = f"several-{kind_of_file}-", tmp_path / "out"
    names = [f"{prefix}{number}" for number in range(3)]
    for name in names:
        assert cli("generate", "a bb ccc", "--id", name, "--capture", "1", "--max-tokens", "4")[0] == 0
        assert cli("manifest", name, "--wait")[0] == 0
    command = ("pull", "--prefix", prefix, "--out", out, "--format", kind_of_file)
    writer, began = Format.writer, []

    def interrupted_writer(self):
        def write(acts, path, advance):
            writer(self)(acts, path, advance)
            began.append(path)
            if len(began) == 2:
                raise KeyboardInterrupt

        return write

    with monkeypatch.context() as patch:
        patch.setattr(Format, "writer", interrupted_writer)
        code, _, err = cli(*command)
    assert (code, "The same command continues" in err) == (130, True)
    (done,) = out.iterdir()
    made = done.stat().st_mtime_ns
    code, said, err = cli(*command)
    assert (code, len(said.splitlines())) == (0, 2)
    assert "skipped 1 of 3 captures because of existing files; --force replaces these" in err
    assert done.stat().st_mtime_ns == made
    assert sorted(item.name for item in out.iterdir()) == [f"{name}.{kind_of_file}" for name in names]
    assert all(OPENERS[kind_of_file](item)[0] for item in out.iterdir())
    code, said, err = cli(*command, "--force")
    assert (code, len(said.splitlines()), "skipped" in err) == (0, 3, False)


def test_the_command_skips_no_folder_that_is_not_an_export(cli, captured, tmp_path):
    (tmp_path / f"{captured}.npz").mkdir()
    code, _, err = cli("pull", "--prefix", captured, "--out", tmp_path, "--format", "npz")
    assert (code, "already exists" in err) == (1, True)


def test_the_command_says_which_extra_an_export_needs(endpoint, captured, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "zarr", None)
    code = command_line.main(["pull", captured, "--endpoint", endpoint, "--out", os.fspath(tmp_path / "x.zarr")])
    assert code == 1
    assert "extra 'zarr'" in capsys.readouterr().err
