"""Captures and extractions as datasets of Ray Data: every row, from a store, from its archive, and from a folder."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import ray
from pyarrow import parquet

import residuum
import residuum.ray
from residuum.ray import captures as module

NAMES = [f"read-{number:02}" for number in range(12)]


@pytest.fixture(scope="module")
def captures(services):
    """Twelve captures, six of which are labelled as for training, all in the archive."""
    with residuum.Client(services["inference"][0], timeout=60) as client:
        wanted = [
            residuum.Capture(layers=[0, 2], labels={"split": "train" if at % 2 else "test", "y": at})
            for at in range(len(NAMES))
        ]
        prompts = [f"The sea has {at} colours and" + " more" * at for at in range(len(NAMES))]
        client.generate_many(prompts, request_ids=NAMES, capture=wanted, max_tokens=3, progress=False)
        for name in NAMES:
            client.manifest(name, wait=60, archived=True)
        yield client


def exported(client, tmp_path, name):
    client.export(name, tmp_path / f"{name}.parquet")
    return parquet.read_table(tmp_path / f"{name}.parquet").replace_schema_metadata()


def in_order(table):
    return table.sort_by([(name, "ascending") for name in ("capture_id", "sequence", "site", "layer", "position")])


@pytest.mark.parametrize("place", ["store", "archive"])
def test_rows_and_columns_are_those_of_the_parquet_exports(cluster, services, captures, tmp_path, place):
    rows = residuum.ray.read_captures(store=services[place], captures=NAMES, override_num_blocks=5)
    table = in_order(pa.concat_tables(ray.get(rows.to_arrow_refs())))
    expected = in_order(pa.concat_tables([exported(captures, tmp_path, name) for name in NAMES]))
    assert table.schema.remove_metadata().equals(expected.schema)
    assert table.replace_schema_metadata().equals(expected)


def test_filters_choices_and_labels(cluster, services, captures):
    rows = residuum.ray.read_captures(
        store=services["archive"], prefix="read-", where="split = train", layers=[2], positions="last_prompt",
        labels=["y", "split"],
    )  # fmt: skip
    found = rows.to_pandas().sort_values("y")
    assert found["y"].tolist() == [1, 3, 5, 7, 9, 11]
    assert set(found["split"]) == {"train"}
    for _, row in found.iterrows():
        acts = captures.activations(row["capture_id"], layers=[2], positions="last_prompt")
        np.testing.assert_array_equal(np.asarray(row["activation"], np.float32), acts[2][0])


def test_whole_numbers_that_no_float_can_hold_become_text():
    found = [module._Found("a", 1, 8, {"y": value}, np.dtype(np.float32), 2) for value in (2**60 + 1, 0.5)]
    assert module._label_type("y", found) == pa.string()
    assert module._label_type("y", found[:1]) == pa.int64()
    assert module._label_type("y", [found[1], found[1]]) == pa.float64()


def test_large_captures_are_read_piece_by_piece(services, captures, tmp_path, monkeypatch):
    """In this process, where the bound can be changed."""
    monkeypatch.setattr(module, "_SMALL_BYTES", 0)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1 << 10)
    expected = in_order(pa.concat_tables([exported(captures, tmp_path, name) for name in NAMES[-2:]]))
    for place in ("store", "archive"):
        source = module._Source(
            {"endpoint": "", "store": services[place], "timeout": 10},
            residuum.Archive(services[place]) if place == "archive" else None,
        )
        choice = module.RowChoice(None, None, None, None, allow_partial=False)
        found = module._look_up(source, NAMES[-2:], "", "", choice)
        (task,) = module.CapturesDatasource(source, found, choice, ()).get_read_tasks(1)
        blocks = list(task())
        assert len(blocks) > 2
        assert in_order(pa.concat_tables(blocks)).equals(expected)


def test_what_cannot_be_read_says_so(cluster, services, captures):
    read = residuum.ray.read_captures
    with pytest.raises(residuum.UnknownCapture, match="no-such"):
        read(store=services["store"], captures=["no-such", NAMES[0]])
    with pytest.raises(residuum.UnknownCapture, match="no-such"):
        read(store=services["archive"], captures=["no-such"])
    with pytest.raises(residuum.InvalidRequest, match="There is no capture whose ID starts with 'nothing-'"):
        read(store=services["store"], prefix="nothing-")
    with pytest.raises(residuum.InvalidRequest, match="Which captures"):
        read(store=services["store"])
    with pytest.raises(residuum.Unreachable, match=r"127\.0\.0\.1:1"):
        read(store="127.0.0.1:1", prefix="", timeout=2)
    with pytest.raises(residuum.InvalidRequest, match="has no layers 40"):
        read(store=services["store"], captures=NAMES, layers=[40])


def test_a_capture_that_is_deleted_before_it_is_read(cluster, services, captures):
    captures.generate("The sea", request_id="soon-gone", capture=residuum.Capture(layers=[0]), max_tokens=1)
    captures.manifest("soon-gone", wait=60)
    rows = residuum.ray.read_captures(store=services["store"], captures=["soon-gone"])
    captures.delete("soon-gone")
    with pytest.raises(Exception, match="soon-gone"):
        rows.materialize()


@pytest.mark.parametrize("pack", [False, True])
def test_the_folder_of_an_extraction(cluster, captures, tmp_path, pack):
    documents = [[*range(3, 8 + at)] for at in range(40)]
    choice = {"pack": True, "context_length": 8, "separator": 2} if pack else {}
    extracted = captures.extract(
        [{"text": document, "y": at % 3} for at, document in enumerate(documents)], tmp_path / "rows",
        capture=residuum.Capture(layers=[0, 2]), keep="y", shard_bytes=20_000, progress=False, **choice,
    )  # fmt: skip
    assert extracted.num_shards > 3
    expected = parquet.read_table(extracted.export(tmp_path / "table", "parquet"))
    rows = residuum.ray.read_extracted(tmp_path / "rows", override_num_blocks=3)
    found = pa.concat_tables(ray.get(rows.to_arrow_refs()))
    order = [("prompt", "ascending")] if pack else [("prompt", "ascending"), ("positions", "ascending")]
    assert found.replace_schema_metadata().sort_by(order).equals(expected.replace_schema_metadata().sort_by(order))


def test_a_job_that_is_not_there(cluster, tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no job"):
        residuum.ray.read_extracted(tmp_path)
