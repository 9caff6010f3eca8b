"""`client.extract` and `residuum extract` against a scripted inference service and a real store."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import residuum
from residuum._async.client import AsyncClient
from residuum.extraction import folder as folder_module
from residuum.extraction import shards
from residuum.extraction.folder import open_folder
from residuum.extraction.inputs.prompts import BadRow, digest
from residuum.extraction.running.runner import Runner
from residuum.extraction.running.services import Services
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2
from tests.client.support.peer import HIDDEN, POST, rows
from tests.small_disk import small_disk

COMPLETE, INCOMPLETE = capture_pb2.CAPTURE_STATE_COMPLETE, capture_pb2.CAPTURE_STATE_INCOMPLETE


def write_prompts(path, count, words=3):
    """Prompts of 1 to `words` tokens. Token i of the peer is the length of word i."""
    with path.open("w") as file:
        for number in range(count):
            text = " ".join("x" * (1 + (number + at) % 9) for at in range(1 + number % words))
            file.write(json.dumps({"text": text, "y": number % 2, "id": f"p{number}"}) + "\n")
    return path


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", 40)


WHAT = residuum.Capture(layers=[1, 4])


@pytest.fixture
def kind():
    """Both clients run the same job, so one of them is enough here; `test_the_asyncio_client` has the other."""
    return residuum.Client


def files(folder):
    """The content of all files but the log, which has times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "log.jsonl"}


def job_id(folder):
    """The start of the names of a job's captures."""
    return json.loads((folder / "log.jsonl").read_text().splitlines()[0])["job"]


class FullDisk:
    """Lets a file of rows fail half-way, after some that succeed."""

    def __init__(self, after):
        self.after = after

    def __enter__(self):
        self.write = shards.Shard.write
        shards.Shard.write = self._write(self.write)

    def __exit__(self, *_):
        shards.Shard.write = self.write

    def _write(self, write):
        def limited(shard, rows, prompts):
            if shard.number < self.after:
                return write(shard, rows, prompts)
            rows.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        return limited


def check_rows(found, count, words=3):
    lengths = [1 + number % words for number in range(count)]
    positions = np.concatenate([np.arange(length) for length in lengths])
    assert found.positions.tolist() == positions.tolist()
    assert found.prompt.tolist() == np.repeat(np.arange(count), lengths).tolist()
    for layer in (1, 4):
        wanted = rows(0, POST, layer, positions)
        got = found.layer(layer)
        assert got.shape == (len(positions), HIDDEN)
        assert np.array_equal(np.asarray(got), wanted)


async def test_all_rows_arrive_in_the_order_of_the_prompts(client, prompts, tmp_path):
    found = await client.extract(prompts, tmp_path / "out", capture=WHAT, keep="y,id", progress=False)
    assert found.is_complete
    check_rows(found, 40)
    assert found.labels("y") == [number % 2 for number in found.prompt.tolist()]
    lines = prompts.read_text().splitlines()
    wanted = [len(word) for line in lines for word in json.loads(line)["text"].split()]
    assert found.token_ids.tolist() == wanted
    assert (found.summary.prompts, found.summary.failed, found.summary.tokens) == (40, 0, len(wanted))
    assert await client.captures(prefix=job_id(found.folder)) == []


class Hold(threading.Event):
    """Holds the scripted service, and says when a request is held."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout=None):
        self.reached.set()
        return super().wait(timeout)


async def test_the_asyncio_client(endpoint, peer, prompts, tmp_path):
    job = {"capture": WHAT, "max_tokens": 1, "progress": False}
    async with residuum.AsyncClient(endpoint) as client:
        found = await client.extract(prompts, tmp_path / "out", **job)
        check_rows(found, 40)
        peer.script.hold = Hold()  # the end of the call releases it
        stopping = asyncio.ensure_future(client.extract(prompts, tmp_path / "two", **job, max_concurrency=1))
        assert await asyncio.to_thread(peer.script.hold.reached.wait, 60)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        manifest = await client.manifest(f"{job_id(tmp_path / 'two')}-000000000", wait=60)
        assert manifest.state == "aborted"
        await client.extract(prompts, tmp_path / "two", **job)
    assert files(tmp_path / "two") == files(tmp_path / "out")


async def test_a_shard_is_a_safetensors_file(client, prompts, tmp_path):
    await client.extract(prompts, tmp_path / "out", capture=WHAT, dtype="float32", progress=False)
    with safe_open(tmp_path / "out" / "rows-00000.safetensors", framework="np") as file:
        assert file.get_tensor("resid_post.4").dtype == np.float32
        assert file.get_tensor("offsets").tolist()[:4] == [0, 1, 3, 6]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["complete"]
    assert index["tensors"]["resid_post.1"] == {"dtype": "float32", "width": HIDDEN}


async def test_many_shards_read_as_one_array(client, prompts, tmp_path):
    found = await client.extract(prompts, tmp_path / "out", capture=WHAT, shard_bytes=300, progress=False)
    check_rows(found, 40)
    layer, every = found.layer(4), np.asarray(found.layer(4))
    assert len(layer.shards) > 5
    assert np.array_equal(layer[7:40], every[7:40])
    assert np.array_equal(layer[::-3], every[::-3])
    assert np.array_equal(layer[[5, 60, -1]], every[[5, 60, -1]])
    mask = np.arange(len(layer)) % 4 == 1
    assert np.array_equal(layer[mask], every[mask])
    assert np.array_equal(layer[11], every[11])
    with pytest.raises(IndexError):
        layer[len(layer)]


async def test_replies_and_sequences_are_kept(client, tmp_path):
    found = await client.extract(["a bb", "ccc"], tmp_path / "out", capture=WHAT, max_tokens=2, n=2, progress=False)
    assert found.sequences.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]  # the last token has no row
    assert found.prompts[0]["reply"] == [" 3 4", " 103 104"]
    assert found.summary.tokens == 3 + 2 * 2 * 2


async def test_an_order_by_seed_and_a_limit(client, prompts, tmp_path):
    kinds = {"shuffle": 3, "limit": 12, "keep": ["id"], "capture": WHAT, "progress": False}
    found = await client.extract(prompts, tmp_path / "one", **kinds)
    again = await client.extract(prompts, tmp_path / "two", **kinds)
    order = [line["input_row"] for line in found.prompts]
    assert len(set(order)) == 12
    assert order != sorted(order)
    assert [line["labels"]["id"] for line in found.prompts] == [f"p{row}" for row in order]
    assert files(again.folder) == files(found.folder)


async def test_kinds_of_prompts(client, peer, tmp_path):
    chat = [{"role": "user", "content": "hello"}]
    await client.extract(
        [{"text": [5, 6]}, {"text": chat}, {"text": "a"}], tmp_path / "a", capture=WHAT, progress=False
    )
    await client.extract(["hi"], tmp_path / "b", capture=WHAT, chat=True, progress=False)
    kinds = [request.WhichOneof("prompt") for request in peer.requests if hasattr(request, "sampling")]
    assert sorted(kinds[:3]) == ["chat", "text", "token_ids"]
    assert kinds[3] == "chat"


async def test_every_prompt_is_steered(client, peer, tmp_path):
    joy = residuum.Vector.from_array(np.ones(HIDDEN, np.float32))
    steer = iter([residuum.Add(joy, layer=2)])
    found = await client.extract(["a", "b", "c"], tmp_path / "out", capture=WHAT, steer=steer, progress=False)
    steered = [len(request.spec.steering.operations) for request in peer.requests if hasattr(request, "sampling")]
    assert steered == [1, 1, 1]
    assert "operations" in found.spec["steering"]


async def test_a_stored_row_may_steer_every_prompt(client, peer, captured, tmp_path):
    """The job reads it once."""
    row = residuum.StoredRow(captured, layer=4, position=1)
    steer = residuum.Set(row, layer=2)
    found = await client.extract(["a", "b"], tmp_path / "out", capture=WHAT, steer=steer, progress=False)
    (wanted,) = rows(0, POST, 4, [1])
    digest = residuum.Vector.from_array(wanted.astype(np.float32)).digest
    requests = [request for request in peer.requests if hasattr(request, "sampling")]
    sent = [next(iter(request.spec.steering.operations)) for request in requests if request.spec.steering.operations]
    assert [operation.set.digest for operation in sent] == [digest] * 2
    assert found.spec["steering"]
    await stopped(
        client, ["a"], tmp_path / "two", "gone", residuum.UnknownCapture,
        steer=residuum.Set(residuum.StoredRow("gone", layer=4, position=1), layer=2),
    )  # fmt: skip


async def test_a_job_that_stops_has_deleted_the_captures_whose_rows_are_in_files(client, tmp_path, monkeypatch):
    """It stops while a thread writes the first file."""
    commit = folder_module.JobFolder.commit
    monkeypatch.setattr(folder_module.JobFolder, "commit", lambda *args: (time.sleep(0.3), commit(*args))[1])
    source = [*(f"a {'b' * number}" for number in range(1, 15)), 3]
    await stopped(client, source, tmp_path / "out", "item 14", shard_bytes=300)
    done = len(residuum.Extracted(tmp_path / "out").prompts)
    left = await client.captures(prefix=job_id(tmp_path / "out"))
    assert 0 < done < 14
    assert sorted(int(item.capture_id.rpartition("-")[2]) for item in left) == list(range(done, 14))


async def test_a_job_that_is_cancelled_before_its_first_prompt_leaves_no_task():
    runner = Runner(None, None, None, None, None, max_concurrency=1, on_error="stop", keep_captures=False)
    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(runner._next(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_the_names_of_new_folders_are_synced(client, prompts, tmp_path, monkeypatch):
    synced, sync = [], folder_module._sync
    monkeypatch.setattr(folder_module, "_sync", lambda path: (synced.append(path), sync(path)))
    await client.extract(prompts, tmp_path / "new" / "deep" / "out", capture=WHAT, progress=False)
    assert {tmp_path, tmp_path / "new", tmp_path / "new" / "deep", tmp_path / "new" / "deep" / "out"} <= set(synced)


async def test_captures_can_be_kept(client, tmp_path):
    found = await client.extract(["a", "b"], tmp_path / "out", capture=WHAT, keep_captures=True, progress=False)
    kept = await client.captures(prefix=job_id(found.folder))
    assert [item.state for item in kept] == ["complete", "complete"]
    await client.extract(["a", "b"], tmp_path / "out", capture=WHAT, progress=False)  # only to open the rows
    assert len(await client.captures(prefix=job_id(found.folder))) == 2


async def test_a_later_run_deletes_no_captures_that_an_earlier_one_kept(client, tmp_path):
    """The first run stops after two prompts, whose captures the second one reads."""
    source = tmp_path / "p.jsonl"
    source.write_text('{"text": "a"}\n{"text": "b"}\n{"text": 3}\n')
    await stopped(client, source, tmp_path / "out", "line 3", keep_captures=True)
    found = await client.extract(source, tmp_path / "out", capture=WHAT, on_error="skip", progress=False)
    assert len(await client.captures(prefix=job_id(found.folder), states=["complete"])) == 2


async def test_labels_of_any_kind_are_kept_as_text(client, tmp_path):
    rows = [{"text": "a", "day": datetime.date(2026, 1, 2), "odd": "\ud83d"}]
    found = await client.extract(rows, tmp_path / "out", capture=WHAT, keep=["day", "odd"], progress=False)
    assert found.labels("day") == ["2026-01-02"]
    assert found.labels("odd") == ["\ud83d"]


async def test_a_prompt_with_half_of_a_character_is_a_broken_row(client, tmp_path):
    prompts = [{"text": "a"}, {"text": "\ud83d"}]
    found = await client.extract(prompts, tmp_path / "out", capture=WHAT, on_error="skip", progress=False)
    (failure,) = found.failures
    assert "half of a character" in failure["failed"]["message"]


async def test_a_start_that_was_killed_leaves_a_folder_that_can_be_used(client, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "job.json.part").write_text('{"format')
    found = await client.extract(["a"], tmp_path / "out", capture=WHAT, progress=False)
    assert len(found) == 1


# ------------------------------------------------------------------------------------------------------ bad input


async def stopped(client, source, folder, match, kind=residuum.ResiduumError, **more):
    with pytest.raises(kind, match=match):
        await client.extract(source, folder, **{"capture": WHAT, "progress": False, **more})


async def test_a_broken_row_stops_the_job_and_is_named(client, peer, prompts, tmp_path):
    """The next run computes nothing again that the first one has computed."""
    lines = prompts.read_text().splitlines()
    lines[17] = '{"text": "a'
    prompts.write_text("\n".join(lines))
    await stopped(
        client, prompts, tmp_path / "out", r"^line 18 of prompts.jsonl is not JSON.*0 of 40", shard_bytes=1 << 20
    )
    await client.extract(prompts, tmp_path / "out", capture=WHAT, on_error="skip", shard_bytes=1 << 20, progress=False)
    assert peer.replayed >= 17


async def test_broken_rows_are_recorded_and_left_out(client, tmp_path):
    path = tmp_path / "bad.jsonl"
    good = '{"text": "a bb"}'
    bad = [
        '{"text": "a',
        "[1]",
        '{"prompt": "a"}',
        '{"text": 3}',
        '{"text": ""}',
        '{"text": []}',
        '{"text": [{"a": 1}]}',
    ]
    path.write_bytes("\n".join([good, "", *bad, good]).encode() + b'\n{"text": "\xff"}\n')
    found = await client.extract(path, tmp_path / "out", capture=WHAT, on_error="skip", progress=False)
    assert len(found) == 4
    assert found.summary.failed == 8
    assert [line["index"] for line in found.failures] == [*range(1, 8), 9]
    messages = [line["failed"]["message"] for line in found.failures]
    assert all(f"line {number}" in message for number, message in zip(range(3, 7), messages, strict=False))
    assert "EMPTY_PROMPT" in [line["failed"]["reason"] for line in found.failures]
    assert json.loads((tmp_path / "out" / "index.json").read_text())["failed"] == 8


BAD_LINES = ['{"text": "a', "[1]", '{"prompt": "a"}', '{"text": 3}']


@pytest.mark.parametrize("version", ["this", "earlier"])
async def test_a_job_with_broken_rows_continues_with_another_version(client, tmp_path, monkeypatch, version):
    """Its errors have other words. An earlier version noted the digests of errors."""
    path, more = tmp_path / "bad.jsonl", {"capture": WHAT, "on_error": "skip", "progress": False}
    path.write_text("\n".join(['{"text": "a bb"}', *BAD_LINES]))
    before = await client.extract(path, tmp_path / "out", **more)
    if version == "earlier":
        file = tmp_path / "out" / "prompts-00000.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines[1:] = [{**line, "sha256": digest([line["failed"]["message"]])} for line in lines[1:]]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        monkeypatch.setattr(
            BadRow, "__init__", lambda self, text, **facts: super(BadRow, self).__init__(f"Now: {text}", **facts)
        )
    found = await client.extract(path, tmp_path / "out", **more)
    assert (found.summary.done_before, list(found.failures)) == (5, list(before.failures))
    monkeypatch.undo()
    path.write_text("\n".join(['{"text": "a bb"}', *BAD_LINES[:-1], '{"text": 4}']))
    await stopped(client, path, tmp_path / "out", r"line 5 of bad\.jsonl has changed", **more)


def circle():
    value = {}
    value["itself"] = [value]
    return value


@pytest.mark.parametrize("value", [{1: 2, "b": 3}, {None: 1, "b": 2}, {(1, 2): 3}, circle()])
async def test_a_row_with_what_json_cannot_have_is_a_broken_row(client, tmp_path, value):
    rows = [{"text": "a", "y": 1}, {"text": "a", "y": value}, {"text": [{"role": "user", "content": value}], "y": 1}]
    more = {"capture": WHAT, "keep": ["y"], "progress": False}
    with pytest.raises(residuum.ExtractStopped, match="item 1 of the input has a value that cannot be written as JSON"):
        await client.extract(rows, tmp_path / "out", **more)
    found = await client.extract(rows, tmp_path / "out", on_error="skip", **more)
    assert [line["index"] for line in found.failures] == [1, 2]
    assert (await client.extract(rows, tmp_path / "out", on_error="skip", **more)).summary.done_before == 3


async def test_long_prompts(client, tmp_path):
    source = [[1, 2, 3], [4] * 9, "a b c d e f g h i"]
    await stopped(
        client, source, tmp_path / "a", "item 1 of the input: The prompt has more than 5 tokens", context_length=5
    )
    more = {"context_length": 5, "capture": WHAT, "progress": False}
    found = await client.extract(source, tmp_path / "b", on_long="skip", **more)
    assert found.prompt.tolist() == [0, 0, 0]
    assert [line["failed"]["reason"] for line in found.failures] == ["PROMPT_TOO_LONG"] * 2
    assert all("on_long" not in line["failed"]["message"] for line in found.failures), "the job has it already"
    chat = [{"role": "user", "content": "hi"}] * 6
    found = await client.extract([*source, chat], tmp_path / "c", on_long="truncate", on_error="skip", **more)
    assert found.token_ids.tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 1, 1, 1, 1, 1]
    assert "conversation cannot be truncated" in found.failures[0]["failed"]["message"]
    await stopped(client, ["x " * 4001], tmp_path / "d", "Too long", residuum.ExtractStopped)


async def test_another_job_is_refused_with_what_differs(client, prompts, tmp_path):
    out = tmp_path / "out"
    await client.extract(prompts, out, capture=WHAT, progress=False)
    before = files(out)
    other = residuum.Capture(layers=[1, 4], positions="last_prompt")
    await stopped(client, prompts, out, r"another job: capture.positions.* was not set and is", capture=other)
    await stopped(client, prompts, out, "prompts was 40 and is 9; limit was not set and is 9", limit=9)
    lines = prompts.read_text().splitlines()
    prompts.write_text("\n".join([*lines[:6], lines[6].replace("x", "y"), *lines[7:]]))
    await stopped(client, prompts, out, "line 7 of prompts.jsonl has changed")
    assert files(out) == before


async def test_a_job_without_a_shard_is_replaced(client, prompts, tmp_path):
    """A mistake in the arguments need not be repeated. What the first job left in the store is deleted."""
    out, small = tmp_path / "out", residuum.Capture(layers=[1])
    with FullDisk(after=0):
        await stopped(client, prompts, out, "cannot write", OSError, capture=small, column="id")
    first = job_id(out)
    assert await client.captures(prefix=first) != []
    check_rows(await client.extract(prompts, out, capture=WHAT, progress=False), 40)
    assert job_id(out) != first
    assert await client.captures(prefix=first) == []


async def test_a_gap_in_the_shards_is_refused(client, prompts, tmp_path):
    out, options = tmp_path / "out", {"capture": WHAT, "shard_bytes": 1000, "progress": False}
    await client.extract(prompts, out, **options)
    (out / "rows-00001.safetensors").unlink()
    before = files(out)
    missing = "rows-00001.safetensors is missing, although rows-00002.safetensors is there"
    await stopped(client, prompts, out, missing, **options)
    with pytest.raises(residuum.InvalidRequest, match=missing):
        residuum.Extracted(out)
    assert files(out) == before
    for name in before:
        if name > "rows-00001":
            (out / name).unlink()
    check_rows(await client.extract(prompts, out, **options), 40)


async def test_a_job_in_which_all_prompts_fail_warns(client, tmp_path):
    with pytest.warns(residuum.EmptyCaptureWarning, match="All prompts failed"):
        await client.extract(
            [[1] * 9], tmp_path / "out", capture=WHAT, on_error="skip", context_length=5, progress=False
        )


async def test_folders_that_cannot_be_used(client, prompts, tmp_path):
    (tmp_path / "notes").write_text("mine")
    await stopped(client, prompts, tmp_path, "folder with other files", FileExistsError)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "rows-00003.safetensors").touch()
    await stopped(client, prompts, tmp_path / "weights", "folder with other files", FileExistsError)
    await stopped(client, prompts, tmp_path / "notes", "is a file", FileExistsError)
    await stopped(client, prompts, tmp_path / "notes" / "out", "cannot be created", OSError)
    with open_folder(tmp_path / "out"):
        await stopped(client, prompts, tmp_path / "out", "Another process runs", FileExistsError)
    assert (tmp_path / "notes").read_text() == "mine"


async def test_inputs_that_cannot_be_used(client, prompts, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "empty.jsonl").write_text("\n\n")
    await stopped(client, tmp_path / "empty.jsonl", out, "no prompts")
    await stopped(client, [], out, "no prompts")
    await stopped(client, tmp_path / "none.jsonl", out, "does not exist", FileNotFoundError)
    await stopped(client, tmp_path / "out.csv", out, "does not exist", FileNotFoundError)
    await stopped(client, prompts.rename(tmp_path / "prompts.csv"), out, "suffix")
    await stopped(client, 7, out, "must be a path", TypeError)
    assert not out.exists()


async def test_a_capture_that_no_prompt_can_have_stops_the_job(client, prompts, tmp_path):
    unknown = residuum.Capture(layers=[99])
    await stopped(
        client, prompts, tmp_path / "out", "No layer 99", residuum.UnknownLayer, capture=unknown, on_error="skip"
    )


async def test_a_file_is_written_while_the_disk_syncs_the_one_before_and_appears_after_it(
    client, prompts, tmp_path, monkeypatch
):
    """The first file waits until the second is written. If files were written one by one, it would wait in vain."""
    out, prepare, names = tmp_path / "out", folder_module.JobFolder.prepare, []
    first, second = threading.Event(), threading.Event()

    def late(folder, shard):
        prepare(folder, shard)
        if shard.number == 0:
            first.set()
            assert second.wait(30)
        elif shard.number == 1:
            assert first.wait(30)
            names.extend(sorted(path.name for path in out.glob("rows-*")))
            second.set()

    monkeypatch.setattr(folder_module.JobFolder, "prepare", late)
    found = await client.extract(prompts, out, capture=WHAT, shard_bytes=300, progress=False)
    assert names == ["rows-00000.part", "rows-00001.part"]
    check_rows(found, 40)
    assert list(out.glob("*.part")) == []


async def test_no_room_for_a_file_while_the_next_one_is_written(client, prompts, tmp_path, monkeypatch):
    out, prepare, second = tmp_path / "out", folder_module.JobFolder.prepare, threading.Event()

    def fail(folder, shard):
        if shard.number == 0:
            assert second.wait(30)
            raise OSError(errno.ENOSPC, "No space left on device")
        prepare(folder, shard)
        second.set()

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.JobFolder, "prepare", fail)
        await stopped(client, prompts, out, "No space left", OSError, shard_bytes=300)
    assert list(out.glob("rows-*")) == list(out.glob("prompts-*")) == []
    check_rows(await client.extract(prompts, out, capture=WHAT, shard_bytes=300, progress=False), 40)


async def test_no_room_on_the_disk(client, prompts, tmp_path):
    out = tmp_path / "out"
    await client.extract(prompts, tmp_path / "whole", capture=WHAT, shard_bytes=300, progress=False)
    full = FullDisk(after=2)
    with full:
        await stopped(client, prompts, out, r"cannot write to .*No space left.*continues", OSError, shard_bytes=300)
    assert residuum.Extracted(out).is_complete is False
    assert list(out.glob("*.part")) == []
    await client.extract(prompts, out, capture=WHAT, shard_bytes=300, progress=False)
    assert files(out) == files(tmp_path / "whole")


async def test_no_room_for_the_log(client, prompts, tmp_path):
    with small_disk(tmp_path / "disk", 4096) as disk:  # job.json takes all of it
        await stopped(client, prompts, disk / "out", r"cannot write to .*No space left.*the same job again", OSError)


class Faults:
    """Raises a failure in each of the next generations, then in none. `calls` counts all generations."""

    def __init__(self, *failures):
        self.failures, self.calls = [*failures], 0

    @contextlib.contextmanager
    def __call__(self):
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        yield


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("a fault"),
        Failure(Reason.ERROR_REASON_CALLER_STALLED, "Too slow."),
        Failure(Reason.ERROR_REASON_ABORTED, "The service stops."),
    ],
    ids=["fault", "stalled", "aborted"],
)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
async def test_a_failure_that_may_pass_costs_no_prompt(client, peer, tmp_path, on_error, failure):
    faults = peer.script.places = Faults(failure, failure)
    more = {"max_concurrency": 1, "capture": WHAT, "progress": False}
    found = await client.extract(["a", "b"], tmp_path / "out", on_error=on_error, **more)
    assert faults.calls == 4
    assert len(found) == 2
    assert not found.failures


@pytest.mark.parametrize(
    ("failure", "times"),
    [(RuntimeError("a fault"), 3), (Failure(Reason.ERROR_REASON_INVALID_FIELD, "No."), 1)],
    ids=["fault", "refusal"],
)
async def test_a_prompt_fails_alone_if_its_failure_does_not_pass(client, peer, tmp_path, failure, times):
    faults = peer.script.places = Faults(*[failure] * times)
    more = {"max_concurrency": 1, "capture": WHAT, "progress": False}
    found = await client.extract(["a", "b"], tmp_path / "out", on_error="skip", **more)
    assert faults.calls == times + 1
    (failed,) = found.failures
    assert failed["input_row"] == 0


@given(
    splits=st.lists(st.integers(0, 5), max_size=6), start=st.integers(-40, 40), stop=st.integers(-40, 40),
    step=st.sampled_from([1, 1, 2, -1, -3]), data=st.data(),
)  # fmt: skip
def test_rows_of_several_shards_are_indexed_like_one_array(splits, start, stop, step, data):
    every = np.arange(sum(splits) * 3, dtype=np.float32).reshape(-1, 3)
    parts = np.split(every, np.cumsum(splits)[:-1]) if splits else []
    layer = residuum.LayerRows(parts, 3, every.dtype)
    assert np.array_equal(np.asarray(layer), every)
    assert np.array_equal(layer[start:stop:step], every[start:stop:step])
    if len(every):
        numbers = data.draw(st.lists(st.integers(-len(every), len(every) - 1)))
        assert np.array_equal(layer[numbers], every[np.array(numbers, int)])
        assert all(np.array_equal(layer[number], every[number]) for number in numbers)


async def test_a_lost_capture_is_computed_again(client, peer, prompts, tmp_path):
    peer.script.outcome = INCOMPLETE
    add, ended = peer._end_capture, []

    def end(spec, name, *arguments):
        ended.append(name)
        if len(ended) > 5:
            peer.script.outcome = COMPLETE
        add(spec, name, *arguments[:2], peer.script.outcome, peer.script)

    peer._end_capture = end
    try:
        found = await client.extract(prompts, tmp_path / "out", capture=WHAT, progress=False, max_concurrency=2)
    finally:
        del peer._end_capture
    check_rows(found, 40)
    assert len(ended) > 40


async def test_a_damaged_capture_is_computed_again(client, prompts, tmp_path, monkeypatch):
    read, refused = Runner._activations, []

    async def damaged(runner, service, names):
        if any(name.endswith("-000000003") for name in names):
            refused.append(names)
            raise residuum.DamagedCapture("its checksum is another one")
        return await read(runner, service, names)

    monkeypatch.setattr(Runner, "_activations", damaged)
    check_rows(await client.extract(prompts, tmp_path / "out", capture=WHAT, progress=False), 40)
    assert [len(names) for names in refused[-1:]] == [1]


async def test_a_service_that_was_restarted_elsewhere_is_found_again(endpoint):
    """One is away at first, then starts, and then is at another address."""
    nowhere, asked = AsyncClient("127.0.0.1:1", timeout=30), []

    async def find_again(number, client):
        asked.append(number)
        if len(asked) == 1:
            raise residuum.Unreachable("it starts", endpoint=client.endpoint)
        return client if client.endpoint == endpoint else AsyncClient(endpoint, timeout=30)

    services = Services([AsyncClient(endpoint, timeout=30), nowhere], 4, 30.0, find_again)
    with pytest.warns(residuum.OutageWarning, match=r"leaves out 127\.0\.0\.1:1"):
        await services.begin()
    await asyncio.wait_for(services._is_back.wait(), 30)
    assert asked == [1, 1]
    assert [service.client.endpoint for service in services.all] == [endpoint, endpoint]
    await services.close()
    with pytest.raises(residuum.ClientClosed):
        await nowhere.info()


async def test_a_job_sends_twice_as_many_prompts_as_the_services_run(endpoint, monkeypatch):
    running = iter(())

    async def info(client):
        limits = inference_pb2.Limits(max_running_requests=next(running))
        return residuum.ModelInfo.from_proto(inference_pb2.GetModelInfoResponse(limits=limits))

    monkeypatch.setattr(AsyncClient, "info", info)
    for wanted, expected in ((None, 2 * (8 + 24 + 24)), (5, 5)):
        running = iter([8, 0, 24])  # the second does not say how many
        services = Services([AsyncClient(endpoint) for _ in range(3)], wanted, 30.0)
        await services.begin()
        assert services.max_concurrency == expected
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(expected):
                await stack.enter_async_context(services.slot())
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stack.enter_async_context(services.slot()), 0.05)
        await services.close()


async def test_a_single_service_is_waited_for_if_it_may_be_restarted(endpoint):
    async def find_again(number, client):
        return client

    for found, can_recover in ((None, False), (find_again, True)):
        services = Services([AsyncClient(endpoint)], 4, 30.0, found)
        assert services.can_recover == can_recover
        await services.close()


async def test_an_extraction_without_rows_causes_a_warning(client, prompts, tmp_path):
    with pytest.warns(residuum.EmptyCaptureWarning, match="No prompt has any of the selected positions") as caught:
        found = await client.extract(
            prompts, tmp_path / "none", capture=residuum.Capture(layers=[1], positions=5000), progress=False
        )
    assert (len(found), found.summary.prompts, found.summary.failed) == (0, 40, 0)
    assert caught[0].filename.endswith("conftest.py")  # the caller, not the client
