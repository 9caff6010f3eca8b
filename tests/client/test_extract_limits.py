"""What a job does where services differ, refuse prompts, or have little room."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from extraction_files import write_extraction
from peer import HIDDEN, POST, RunningPeer, rows
from test_extract import check_rows, files, job_id, write_prompts

import residuum
from residuum.v1 import capture_pb2, tensor_pb2

WHAT = residuum.Capture(layers=[1, 4])
BF16, FP16 = tensor_pb2.DATA_TYPE_BFLOAT16, tensor_pb2.DATA_TYPE_FLOAT16


@pytest.fixture
def kind():
    """Both clients run the same job."""
    return residuum.Client


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", 40)


@pytest.fixture
def second(store):
    running = RunningPeer(store.endpoint)
    yield running
    running.stop()


# ------------------------------------------------------------------------------------------- services that differ


def as_by_an_earlier_version(folder):
    """Remove what the services decide from job.json."""
    document = json.loads((folder / "job.json").read_text())
    del document["spec"]["rows"]
    (folder / "job.json").write_text(json.dumps(document))


async def half(client, prompts, folder, **more):
    """Run a job that stops at its prompt 30, with some files on the disk."""
    lines = prompts.read_text().splitlines()
    prompts.write_text("\n".join([*lines[:30], "{", *lines[31:]]))
    with pytest.raises(residuum.ExtractStopped):
        await client.extract(prompts, folder, capture=WHAT, shard_bytes=300, progress=False, **more)
    prompts.write_text("\n".join(lines))
    assert 0 < len(residuum.Extracted(folder).prompts) < 40
    await client.delete(prefix=f"{job_id(folder)}-")


@pytest.mark.parametrize("version", ["this", "earlier"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": FP16}, r'rows\.dtype was "bfloat16" and is "float16"\. Run the job as it was with a service of'),
        ({"default_encoding": capture_pb2.ENCODING_FULL8}, r'rows\.dtype was "bfloat16" and is "float32"'),
    ],
)
async def test_a_job_continues_only_with_the_same_kind_of_rows(client, peer, prompts, tmp_path, change, match, version):
    out = tmp_path / "out"
    await half(client, prompts, out)
    if version == "earlier":
        as_by_an_earlier_version(out)
    before = files(out)
    vars(peer.script).update(change)
    with pytest.raises(residuum.InvalidRequest, match=match):
        await client.extract(prompts, out, capture=WHAT, shard_bytes=300, progress=False)
    assert files(out) == before
    peer.reset()
    check_rows(await client.extract(prompts, out, capture=WHAT, shard_bytes=300, progress=False), 40)


async def test_encodings_whose_rows_have_one_dtype_are_told_apart(client, peer, prompts, tmp_path):
    peer.script.default_encoding = capture_pb2.ENCODING_FULL8
    await half(client, prompts, tmp_path / "out")
    peer.script.default_encoding = capture_pb2.ENCODING_TOPK8
    with pytest.raises(residuum.InvalidRequest, match=r'rows\.encoding was "full8" and is "topk8"'):
        await client.extract(prompts, tmp_path / "out", capture=WHAT, shard_bytes=300, progress=False)


async def test_a_job_in_float32_continues_on_a_service_of_another_dtype(client, peer, prompts, tmp_path):
    """bfloat16 and float16 have the peer's values exactly."""
    out = tmp_path / "out"
    await half(client, prompts, out, dtype="float32")
    peer.script.dtype = FP16
    found = await client.extract(prompts, out, capture=WHAT, shard_bytes=300, dtype="float32", progress=False)
    assert found.layer(4).dtype == np.float32
    assert np.array_equal(np.asarray(found.layer(4)), rows(0, POST, 4, found.positions).astype(np.float32))


async def test_rows_of_another_kind_than_those_in_files_stop_the_job(client, peer, prompts, tmp_path):
    """The service says that it has one dtype, and captures in another."""
    out = tmp_path / "out"
    await half(client, prompts, out)
    peer.script.dtype, peer.script.stated_dtype = FP16, BF16
    wrong = rf"resid_post.1 are {HIDDEN} × float16, and those before {HIDDEN} × bfloat16"
    with pytest.raises(residuum.InvalidRequest, match=wrong):
        await client.extract(prompts, out, capture=WHAT, shard_bytes=300, progress=False)
    await client.delete(prefix=f"{job_id(out)}-")
    peer.reset()
    check_rows(await client.extract(prompts, out, capture=WHAT, shard_bytes=300, progress=False), 40)


async def test_services_that_encode_rows_differently_are_refused(client, second, prompts, tmp_path):
    both = {"endpoints": [second.endpoint], "progress": False}
    second.servicer.script.default_encoding = capture_pb2.ENCODING_FULL8
    with pytest.raises(residuum.InvalidRequest, match=r"default encoding at .* is 'full8', and at another one 'raw'"):
        await client.extract(prompts, tmp_path / "out", capture=WHAT, **both)
    named = residuum.Capture(layers=[1, 4], encoding="raw")
    check_rows(await client.extract(prompts, tmp_path / "out", capture=named, **both), 40)
    second.servicer.script.dtype = FP16
    with pytest.raises(residuum.InvalidRequest, match=r"different models: .* dtype is 'float16'"):
        await client.extract(prompts, tmp_path / "two", capture=named, **both)


@pytest.mark.parametrize("width", [4, 6])
def test_a_folder_with_rows_of_different_kinds_is_refused(tmp_path, width):
    """An earlier version could write one, and training read one dtype as the other."""
    folder = write_extraction(tmp_path / "job", [[3], [3]], dtype=ml_dtypes.bfloat16, total=4)
    other = write_extraction(tmp_path / "other", [[3], [3]], dtype=np.float16, width=width)
    (other / "rows-00001.safetensors").rename(folder / "rows-00001.safetensors")
    wrong = (
        rf"rows-00001\.safetensors has rows of resid_post.3 that are {width} × float16, and .* 4 × bfloat16: .* Delete"
    )
    with pytest.raises(residuum.InvalidRequest, match=wrong):
        residuum.Extracted(folder)


def test_parts_of_different_dtypes_are_no_rows_of_one_layer():
    parts = [np.zeros((2, 4), np.float16), np.zeros((2, 4), ml_dtypes.bfloat16)]
    with pytest.raises(ValueError, match="4 × bfloat16"):
        residuum.LayerRows(parts, 4, np.dtype(ml_dtypes.bfloat16))
