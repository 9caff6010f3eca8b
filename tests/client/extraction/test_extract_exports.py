"""Extractions as Hugging Face datasets and as Parquet."""

from __future__ import annotations

import io
import json
import sys
import tarfile

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest

import residuum
from residuum.extraction.results import tables_out, tensors_out
from tests.client.extraction.test_extract import WHAT, stopped
from tests.client.support.extraction_files import write_extraction
from tests.client.support.peer import HIDDEN

SOURCE = [{"text": [2 + (number + at) % 7 for at in range(1 + number % 5)], "y": number} for number in range(20)]


@pytest.fixture
def kind():
    return residuum.Client


async def test_labels_that_json_does_not_have_are_null(client, tmp_path):
    values = [1.5, float("nan"), float("-inf"), {"score": [float("nan"), 2]}]
    source = [{"text": [2, 3], "y": value} for value in values]
    rows = await client.extract(source, tmp_path / "rows", capture=WHAT, keep="y", progress=False)
    assert rows.document_labels("y") == [1.5, None, None, {"score": [None, 2]}]
    rows.export(tmp_path / "zarr", "zarr")
    with tarfile.open(rows.export(tmp_path / "tar", "tar") / "data-00000.tar") as archive:
        lines = [archive.extractfile(name).read().decode() for name in archive.getnames() if name.endswith(".json")]
    for path in (tmp_path / "rows" / "prompts-00000.jsonl", tmp_path / "zarr" / "prompts.jsonl"):
        lines += path.read_text().splitlines()
    assert len(lines) == 12
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)
    again = await client.extract(source, tmp_path / "rows", capture=WHAT, keep="y", progress=False)
    assert again.summary.done_before == 4, "the prompts are those of before"


async def test_packed_windows_are_the_layout_of_cached_activations(client, tmp_path):
    rows = await client.extract(
        SOURCE, tmp_path / "rows", capture=WHAT, keep="y", pack=True, context_length=6, separator=1, progress=False
    )
    data = datasets.load_from_disk(rows.export(tmp_path / "out")).with_format("numpy")
    assert data.features["blocks.4.hook_resid_post"] == datasets.Array2D((6, HIDDEN), "float32")
    assert data.features["token_ids"].length == 6
    assert len(data) == len(rows) // 6 == len(rows.prompts)
    for name, layer in (("blocks.1.hook_resid_post", 1), ("blocks.4.hook_resid_post", 4)):
        wanted = np.asarray(rows.layer(layer), np.float32).reshape(-1, 6, HIDDEN)
        assert np.array_equal(data[:][name], wanted)
        assert np.array_equal(data[3][name], wanted[3])
    assert data.features["token_ids"].feature.dtype == "int32"
    for name, wanted in (
        ("token_ids", rows.token_ids), ("positions", rows.positions), ("documents", rows.documents),
        ("y", np.array(rows.labels("y"))),
    ):  # fmt: skip
        assert np.array_equal(data[:][name].ravel(), wanted)
    assert data[:]["prompt"].tolist() == list(range(len(data)))


@pytest.mark.parametrize("values", [[2**64, 1], [2**60 + 1, 0.5], ["a", "\ud800"]])
async def test_labels_that_arrow_cannot_hold_become_json(client, tmp_path, values):
    source = [{"text": [1, 2], "y": value} for value in values]
    rows = await client.extract(source, tmp_path / "rows", capture=WHAT, keep="y", progress=False)
    table = pq.read_table(rows.export(tmp_path / "out", "parquet"))
    assert [json.loads(text) for text in table.column("y").to_pylist()] == [values[0]] * 2 + [values[1]] * 2


@pytest.mark.parametrize("kind_of_table", ["datasets", "parquet"])
async def test_prompts_of_many_lengths_have_a_row_for_each_token(client, tmp_path, kind_of_table):
    source = [{**row, "kind": ["a", None][row["y"] % 2], "any": row["y"] if row["y"] % 3 else "x"} for row in SOURCE]
    rows = await client.extract(source, tmp_path / "rows", capture=WHAT, keep="y,kind,any", progress=False)
    out = rows.export(tmp_path / "out", kind_of_table)
    if kind_of_table == "datasets":
        data = datasets.load_from_disk(out)
    else:
        assert pq.read_table(out).num_rows == len(rows)
        data = datasets.load_dataset("parquet", data_dir=str(out), split="train", cache_dir=tmp_path / "cache")
    data = data.with_format("numpy")
    assert np.array_equal(data[:]["blocks.4.hook_resid_post"], np.asarray(rows.layer(4), np.float32))
    assert data[:]["token_ids"].tolist() == rows.token_ids.tolist()
    assert data[:]["prompt"].tolist() == rows.prompt.tolist()
    assert data[:]["y"].tolist() == rows.labels("y")
    assert list(data.with_format(None)["kind"]) == rows.labels("kind")
    assert data.with_format(None)[0]["any"] == '"x"'


async def test_many_files_are_one_dataset(client, tmp_path, monkeypatch):
    monkeypatch.setattr("residuum.extraction.results.tables_out._PIECE_BYTES", 1000)
    monkeypatch.setattr("residuum.extraction.results.tables_out._FILE_BYTES", 2000)
    rows = await client.extract(SOURCE, tmp_path / "rows", capture=WHAT, shard_bytes=300, progress=False)
    out = rows.export(tmp_path / "out")
    assert len(list(out.glob("*.arrow"))) > 1
    data = datasets.load_from_disk(out).with_format("numpy")
    assert np.array_equal(data[:]["blocks.1.hook_resid_post"], np.asarray(rows.layer(1), np.float32))


def test_the_command_line_exports(cli, tmp_path):
    (tmp_path / "p.txt").write_text("a bb ccc\nccc bb a\n")
    command = ["extract", tmp_path / "p.txt", "--output", tmp_path / "rows", "--capture", "1"]
    code, _, errors = cli(*command, "--export", f"datasets:{tmp_path / 'out'}")
    assert (code, errors) == (0, "")
    assert datasets.load_from_disk(tmp_path / "out")["token_ids"][:] == [1, 2, 3, 3, 2, 1]
    code, _, errors = cli(*command, "--export", f"parquet:{tmp_path / 'out'}")
    assert (code, "exists already" in errors) == (1, True)
    with pytest.raises(SystemExit):
        cli(*command, "--export", "csv:out")
    with pytest.raises(SystemExit):
        cli(*command, "--export", f"tar:{tmp_path / 'a'}", "--export", f"parquet:{tmp_path / 'a'}")
    with pytest.raises(SystemExit):
        cli(*command, "--export", f"tar:{tmp_path / 'a'}", "--export", f"parquet:{tmp_path}/b/../a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("folder", ["new", "new/rows", "new/other/../rows"])
def test_an_export_where_the_job_writes_is_refused_before_the_job(cli, tmp_path, capsys, folder):
    (tmp_path / "p.txt").write_text("a bb ccc\n")
    command = ["extract", tmp_path / "p.txt", "--output", tmp_path / "new" / "rows", "--capture", "1"]
    with pytest.raises(SystemExit):
        cli(*command, "--export", f"tar:{tmp_path / folder}")
    assert "the folder of --output" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_command_line_exports_to_several_formats(cli, tmp_path):
    (tmp_path / "p.txt").write_text("a bb ccc\n")
    command = ["extract", tmp_path / "p.txt", "--output", tmp_path / "rows", "--capture", "1"]
    exports = ["--export", f"parquet:{tmp_path / 'table'}", "--export", f"tar:{tmp_path / 'tar'}"]
    assert cli(*command, *exports)[::2] == (0, "")
    assert list((tmp_path / "table").glob("*.parquet"))
    assert list((tmp_path / "tar").glob("*.tar"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--keep", "positions", "--export", "parquet:{}/table"],
            "The kept column 'positions' has the name",
        ),
        (["--export", "zarr:{}/zarr"], "Exports to zarr need the package zarr"),
    ],
)
def test_an_export_that_would_fail_is_refused_before_the_job(cli, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "zarr", None)  # as if it were not installed
    (tmp_path / "p.jsonl").write_text('{"text": "a", "positions": 1}\n')
    command = ["extract", tmp_path / "p.jsonl", "--output", tmp_path / "rows", "--capture", "1"]
    code, _, errors = cli(*command, *(argument.format(tmp_path) for argument in arguments))
    assert (code, message in errors) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


async def test_replies_to_one_prompt_are_told_apart(client, tmp_path):
    rows = await client.extract(["a bb", "ccc"], tmp_path / "rows", capture=WHAT, max_tokens=2, n=2, progress=False)
    data = datasets.load_from_disk(rows.export(tmp_path / "out"))
    assert data["sequences"][:] == rows.sequences.tolist()
    assert set(data["sequences"][:]) == {0, 1}
    one = await client.extract(["a bb"], tmp_path / "one", capture=WHAT, max_tokens=2, progress=False)
    assert "sequences" not in datasets.load_from_disk(one.export(tmp_path / "no")).column_names


async def test_bad_exports(client, tmp_path):
    rows = await client.extract([{"text": "a", "prompt": 1}], tmp_path / "rows", capture=WHAT, keep="prompt",
                                progress=False)  # fmt: skip
    with pytest.raises(residuum.InvalidRequest, match="kept column 'prompt' has the name"):
        rows.export(tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(FileExistsError, match="exists already"):
        rows.export(tmp_path / "rows")
    with pytest.raises(residuum.InvalidRequest, match=r"does not exist\. Choose among datasets, parquet"):
        rows.export(tmp_path / "out", "csv")
    await stopped(client, [3], tmp_path / "no", "item 0")
    with pytest.raises(residuum.InvalidRequest, match="is not complete"):
        residuum.Extracted(tmp_path / "no").export(tmp_path / "out")
    with pytest.raises(residuum.InvalidRequest, match="no rows to export"):
        residuum.Extracted(tmp_path / "no").export(tmp_path / "out", allow_partial=True)


def test_a_job_that_is_not_complete_is_exported_only_on_request(tmp_path):
    rows = residuum.Extracted(write_extraction(tmp_path / "job", [[4, 4]], total=3))
    with pytest.raises(residuum.InvalidRequest, match="is not complete"):
        rows.export(tmp_path / "out")
    assert len(datasets.load_from_disk(rows.export(tmp_path / "out", allow_partial=True))) == 8


def test_an_export_touches_no_other_folder(tmp_path):
    rows = residuum.Extracted(write_extraction(tmp_path / "job", [[2]]))
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine").write_text("x")
    rows.export(tmp_path / "out")
    assert (tmp_path / "out.part" / "mine").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "out", "out.part"]


def test_two_exports_at_once_do_not_disturb_each_other(tmp_path, monkeypatch):
    rows = residuum.Extracted(write_extraction(tmp_path / "job", [[2, 5]]))
    write = tables_out._write_state

    def also_export(table, folder, files):
        monkeypatch.setattr(tables_out, "_write_state", write)
        rows.export(tmp_path / "out")  # another process is faster
        write(table, folder, files)

    monkeypatch.setattr(tables_out, "_write_state", also_export)
    with pytest.raises(FileExistsError, match="already exists"):
        rows.export(tmp_path / "out")
    assert len(datasets.load_from_disk(tmp_path / "out")) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "out"]


@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 3], [2, 3]])
def test_the_layout_of_prompts_does_not_depend_on_their_lengths(tmp_path, lengths):
    rows = residuum.Extracted(write_extraction(tmp_path / "job", [lengths]))
    data = datasets.load_from_disk(rows.export(tmp_path / "out"))
    assert len(data) == sum(lengths)
    assert np.shape(data[0]["blocks.3.hook_resid_post"]) == (4,)


def test_other_data_have_another_fingerprint(tmp_path):
    """datasets keeps results by the fingerprint."""
    found = []
    for name, lengths in (("a", [3, 3]), ("b", [2, 4]), ("c", [3, 3])):
        rows = residuum.Extracted(write_extraction(tmp_path / name, [lengths]))
        found.append(datasets.load_from_disk(rows.export(tmp_path / f"{name}-out"))._fingerprint)
    assert found[0] != found[1]
    assert found[0] == found[2]


async def test_labels_of_every_kind(client, tmp_path):
    source = [{"text": "a", "yes": bool(number % 2), "share": number / 2} for number in range(4)]
    rows = await client.extract(source, tmp_path / "rows", capture=WHAT, keep="yes,share", progress=False)
    data = datasets.load_from_disk(rows.export(tmp_path / "out"))
    assert (data.features["yes"].dtype, data.features["share"].dtype) == ("bool", "float64")
    assert list(data["yes"]) == [False, True, False, True]
    assert list(data["share"]) == [0, 0.5, 1, 1.5]


async def test_zarr_has_an_array_for_each_point(client, tmp_path):
    import zarr

    source = [{"text": row["text"] * 40, "y": row["y"]} for row in SOURCE]
    rows = await client.extract(source, tmp_path / "rows", capture=WHAT, keep="y", shard_bytes=20_000, progress=False)
    assert rows.num_shards > 2
    group = zarr.open_group(str(rows.export(tmp_path / "out", "zarr")), mode="r")
    assert sorted(group.array_keys()) == sorted([*rows.points, "positions", "prompt", "sequences", "token_ids"])
    for point in rows.points:
        assert np.array_equal(group[point][:], np.asarray(rows.at(point), np.float32))
    for name in ("token_ids", "positions", "sequences", "prompt"):
        assert group[name][:].tolist() == getattr(rows, name).tolist()
    assert group.attrs["spec"] == rows.spec
    lines = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert [lines[number]["labels"]["y"] for number in group["prompt"][:]] == rows.labels("y")


async def test_tar_files_have_a_sample_for_each_prompt_with_rows(client, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_out, "_TAR_BYTES", 100_000)
    source = [*SOURCE, {"text": "not tokens" * 1000, "y": -1}]
    rows = await client.extract(
        source, tmp_path / "rows", capture=WHAT, keep="y", shard_bytes=2_000, context_length=8, on_long="skip",
        on_error="skip", progress=False,
    )  # fmt: skip
    files = sorted(rows.export(tmp_path / "out", "tar").iterdir())
    assert len(files) > 1
    samples = {}
    for path in files:
        with tarfile.open(path) as archive:
            for (
                entry
            ) in archive:  # WebDataset: the key is what is before the first dot, and a sample's files are together
                key, _, name = entry.name.partition(".")
                assert key in {*samples, f"{int(key):09}"}
                samples.setdefault(key, {})[name] = archive.extractfile(entry).read()
    assert sorted(map(int, samples)) == sorted(set(rows.prompt.tolist()))
    for key, sample in samples.items():
        line, chosen = json.loads(sample["json"]), rows.prompt == int(key)
        assert line["labels"] == {"y": source[int(key)]["y"]}
        for point in rows.points:
            values = np.load(io.BytesIO(sample[f"{point}.npy"]))
            assert np.array_equal(values, np.asarray(rows.at(point)[chosen], np.float32))
        assert np.load(io.BytesIO(sample["token_ids.npy"])).tolist() == rows.token_ids[chosen].tolist()
