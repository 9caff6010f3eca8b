"""Packing documents into windows, alone and in a job."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import residuum
from residuum.extraction.inputs.packing import PackedItems
from residuum.extraction.inputs.prompts import Items, ListedRows
from residuum.extraction.job import _check_prompts
from tests.client.extraction.test_extract import WHAT, FullDisk, files, stopped
from tests.client.support.peer import POST, rows

BOS = 1


@pytest.fixture
def kind():
    return residuum.Client


def packed(documents, length, *, separator=BOS, **more):
    items = Items(ListedRows(documents, "text"), column="text", keep=more.pop("keep", ()))
    found = PackedItems(
        items, length=length, separator=separator, tokenizer=None, **{"limit": None, "on_error": "stop", **more}
    )
    for _ in found.cut():
        pass
    return found


def reference(documents, length, separator):
    """The rule token by token, with no cursor to continue at."""
    windows, window = [], []
    for document in documents:
        for at, token in enumerate(document):
            if separator is not None and (at == 0 or not window) and token != separator:
                window.append((separator, None))
                if len(window) == length:
                    windows.append(window)
                    window = [(separator, None)]
            window.append((token, at))
            if len(window) == length:
                windows.append(window)
                window = []
    return [[token for token, _ in window] for window in windows]


@given(
    documents=st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=12),
    length=st.integers(2, 7), separator=st.sampled_from([BOS, None]), limit=st.none() | st.integers(1, 4),
)  # fmt: skip
def test_windows_follow_the_rule(documents, length, separator, limit):
    wanted = reference(documents, length, separator)
    if not wanted:
        with pytest.raises(residuum.InvalidRequest, match="fill no window"):
            packed(documents, length, separator=separator)
        return
    items = packed(documents, length, separator=separator, limit=limit)
    found = [items.item(index) for index in range(len(items))]
    assert [item.prompt for item in found] == wanted[:limit]
    for item in reversed(found):  # any order, as a job that continues asks
        assert items.item(item.index) == item
        ends = [document["position"] for document in item.documents[1:]] + [length]
        for document, end in zip(item.documents, ends, strict=True):
            own = item.prompt[document["position"] : end]
            source = documents[document["input_row"]][document["offset"] :]
            assert own
            assert source
            if separator is not None and source[0] != separator:
                source = [separator, *source]
            assert own == source[: len(own)]
            assert len(own) == len(source) or end == length  # a document ends only at its end, or at the window's


async def test_rows_know_their_document_and_its_labels(client, tmp_path):
    source = [{"text": [5, 6, 7], "y": "a"}, {"text": [8, 9], "y": "b"}, {"text": [2, 3, 4, 5], "y": "c"}]
    found = await client.extract(
        source, tmp_path / "out", capture=WHAT, keep="y", pack=True, context_length=5, separator=BOS, progress=False
    )
    assert found.token_ids.tolist() == [1, 5, 6, 7, 1, 1, 8, 9, 1, 2]
    assert found.documents.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert found.labels("y") == list("aaaabbbbcc")
    assert found.positions.tolist() == [*range(5)] * 2
    assert np.array_equal(np.asarray(found.layer(4)), rows(0, POST, 4, np.tile(np.arange(5), 2)))
    assert found.spec["separator"] == BOS


@pytest.mark.parametrize("positions", [[0], [1, 4], "last_prompt"])
async def test_rows_of_some_positions_know_their_document(client, tmp_path, positions):
    source = [{"text": [2 + number] * (1 + number % 4), "y": number} for number in range(20)]
    more = {"keep": "y", "pack": True, "context_length": 7, "separator": BOS, "progress": False}
    every = await client.extract(source, tmp_path / "every", capture=WHAT, **more)
    capture = residuum.Capture(layers=[1], positions=positions)
    some = await client.extract(source, tmp_path / "some", capture=capture, **more)
    kept = np.isin(every.positions, {"last_prompt": [6]}.get(str(positions), positions))
    assert 0 < len(some) == kept.sum() < len(every)
    assert some.documents.tolist() == every.documents[kept].tolist()
    assert some.labels("y") == np.array(every.labels("y"))[kept].tolist()
    assert some.positions is some.positions  # read once


async def test_a_packed_job_continues_with_the_same_files(client, peer, tmp_path):
    source = [[2 + (number + at) % 7 for at in range(1 + number % 9)] for number in range(60)]
    more = {"capture": WHAT, "pack": True, "context_length": 6, "separator": BOS, "shard_bytes": 600, "progress": False}
    await client.extract(source, tmp_path / "whole", **more)
    with FullDisk(after=2):
        await stopped(client, source, tmp_path / "out", "cannot write", OSError, **more)
    found = await client.extract(source, tmp_path / "out", **more)
    assert found.summary.done_before > 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    await stopped(client, source, tmp_path / "out", "separator was 1 and is 2", **{**more, "separator": 2})
    changed = [*source[:30], [9], *source[31:]]
    await stopped(client, changed, tmp_path / "out", "prompts was|has changed", **more)


async def test_without_packing_documents_are_the_prompts(client, tmp_path):
    found = await client.extract(["a", "b c"], tmp_path / "out", capture=WHAT, progress=False)
    assert found.documents.tolist() == [0, 1, 1]


async def test_bad_documents(client, tmp_path):
    more = {"pack": True, "context_length": 3, "separator": None}
    source = [[5, 6], "text", [{"role": "user", "content": "hi"}], [-1], [], np.array([7]), [True], [8, 9], [2.5]]
    await stopped(client, source, tmp_path / "a", "item 1 of the input is a text.*tokenizer", **more)
    with pytest.warns(residuum.LeftOutWarning, match="5 documents were left out. The first: item 1"):
        found = await client.extract(source, tmp_path / "b", capture=WHAT, on_error="skip", progress=False, **more)
    assert found.token_ids.tolist() == [5, 6, 7]
    assert (found.summary.left_out, found.summary.failed) == (5, 0)
    assert "0 failed, 5 documents left out" in str(found.summary)
    reasons = {1: "is a text", 2: "is a conversation", 3: "has -1 among", 6: "has True among", 8: "has 2.5 among"}
    assert [line["input_row"] for line in found.failures] == list(reasons)
    for line, reason in zip(found.failures, reasons.values(), strict=True):
        assert reason in line["failed"]["message"]
        assert line["failed"]["reason"] == "INVALID_FIELD"


@given(
    documents=st.lists(st.lists(st.integers(0, 4), max_size=5) | st.just([-1]), min_size=1, max_size=30),
    length=st.integers(2, 7), limit=st.none() | st.integers(1, 4),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::residuum.LeftOutWarning")
def test_each_document_that_is_left_out_is_recorded_once(documents, length, limit):
    wanted = reference([[] if -1 in part else part for part in documents], length, None)[:limit]
    if not wanted:
        return
    items = packed(documents, length, separator=None, limit=limit, on_error="skip")
    found = [line["input_row"] for number in range(len(items)) for line in items.item(number).left_out]
    last = items.item(len(items) - 1).documents[-1]["input_row"]
    broken = [row for row, part in enumerate(documents) if -1 in part]
    assert found == [row for row in broken if limit is None or len(wanted) < limit or row < last]


def test_tokens_may_be_integers_of_numpy():
    items = packed([[np.int64(5), np.uint16(6)], np.array([7, 8], np.int32)], 3)
    assert items.item(0).prompt == [BOS, 5, 6]
    assert items.item(1).documents == packed([[5, 6], [7, 8]], 3).item(1).documents


def test_a_long_document_is_read_once(monkeypatch):
    monkeypatch.setattr("residuum.extraction.inputs.packing._CACHED_TOKENS", 3000)
    items = packed([[1, 2], [3] * 20_000, *([[4] * 900] * 9)], 10, separator=None)
    reads, read = [], items._documents.item
    monkeypatch.setattr(items._documents, "item", lambda number: (reads.append(number), read(number))[1])
    items._cache.clear()
    items._cached_tokens = 0
    for index in range(len(items)):
        items.item(index)
    assert reads == list(range(11))
    assert len(items._cache) == 2
    assert items._cached_tokens <= 3000


def test_cutting_pauses_for_other_work(monkeypatch):
    monkeypatch.setattr("residuum.extraction.inputs.packing._PAUSE_SECONDS", 0)
    items = Items(ListedRows([[1]] * 500, "text"), column="text")
    found = PackedItems(items, length=400, separator=None, tokenizer=None, limit=None, on_error="stop")
    assert len(list(found.cut())) >= 400  # also inside of a window


def test_the_check_of_a_job_that_continues_pauses():
    items = packed([[number % 5] for number in range(400)], 2, separator=None)
    digests = [items.item(index).digest for index in range(200)]
    folder = SimpleNamespace(path="out", digests=lambda: digests)
    assert len(list(_check_prompts(folder, items))) >= 3
    digests[150] = digests[151]
    with pytest.raises(residuum.InvalidRequest, match="window 150, which begins in item 300 of the input has changed"):
        list(_check_prompts(folder, items))


async def test_cutting_can_be_cancelled(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("residuum.extraction.inputs.packing._PAUSE_SECONDS", 0)
    read = ListedRows.row

    def slowly(self, number):
        time.sleep(0.01)
        return read(self, number)

    monkeypatch.setattr(ListedRows, "row", slowly)
    more = {"pack": True, "context_length": 5, "separator": None, "progress": False}
    async with residuum.AsyncClient(endpoint) as client:
        job = asyncio.ensure_future(client.extract([[1]] * 3000, tmp_path / "out", capture=WHAT, **more))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
    assert time.monotonic() - began < 20  # reading all of them takes 30 s


@pytest.fixture
def model_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 3, "b": 4, "?": 5}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return tmp_path / "model"


async def test_a_job_continues_only_with_its_tokenizer(client, tmp_path, model_folder):
    more = {"pack": True, "context_length": 3, "tokenizer": model_folder}
    found = await client.extract(["a b a", "b"], tmp_path / "out", capture=WHAT, progress=False, **more)
    assert found.token_ids.tolist() == [0, 3, 4, 0, 3, 0]
    file = model_folder / "tokenizer.json"
    assert found.spec["tokenizer_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text(file.read_text().replace('"b": 4', '"b": 6'))
    await stopped(client, ["a b a", "b"], tmp_path / "out", "tokenizer_sha256 was .* and is", **more)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
async def test_a_damaged_tokenizer(client, tmp_path, model_folder, name):
    (model_folder / name).write_text("[1, ")
    more = {"pack": True, "context_length": 3, "tokenizer": model_folder}
    await stopped(client, ["a"], tmp_path / "out", f"{name} cannot be read", residuum.InvalidRequest, **more)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"pack": True}, "needs context_length"),
        ({"pack": True, "context_length": 1}, "at least 2"),
        (
            {"pack": True, "context_length": 4, "capture": residuum.Capture(layers=[1], reduction="mean")},
            "reduction='mean' and pack=True exclude each other",
        ),
        ({"pack": True, "context_length": 4, "chat": True}, "conversation cannot be packed"),
        ({"pack": True, "context_length": 4, "separator": "x"}, "must be 'bos'"),
        ({"pack": True, "context_length": 4}, "needs tokenizer"),
        ({"tokenizer": "x"}, "needs pack=True"),
        ({"separator": None}, "separator=None needs pack=True"),
        ({"pack": True, "context_length": 4, "separator": 1, "on_long": "truncate"}, "exclude each other"),
    ],
)
async def test_arguments_that_do_not_go_together(client, tmp_path, arguments, match):
    await stopped(client, [[1]], tmp_path / "out", match, residuum.InvalidRequest, **arguments)


def test_the_command_line(cli, tmp_path):
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps({"text": [2, 3, 4]}) + "\n" for _ in range(9)))
    flags = ["--output", tmp_path / "out", "--capture", "1", "--pack", "--context-length", "4", "--limit", "5"]
    code, _, errors = cli("extract", source, *flags, "--separator", "1")
    assert (code, errors) == (0, "")
    assert residuum.Extracted(tmp_path / "out").token_ids.tolist() == [1, 2, 3, 4] * 5


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--separator", "none"], "--separator none needs --pack"),
        (["--separator", "7"], "--separator 7 needs --pack"),
        (["--tokenizer", "x"], "--tokenizer needs --pack"),
        (["--pack"], "--pack needs --context-length"),
        (["--pack", "--context-length", "4"], "needs --tokenizer"),
        (["--pack", "--context-length", "4", "--separator", "1", "--on-long", "truncate"], "--on-long truncate and"),
    ],
)
def test_errors_of_the_command_line_name_flags(cli, tmp_path, flags, match):
    (tmp_path / "p.txt").write_text("a\n")
    code, _, errors = cli("extract", tmp_path / "p.txt", "--output", tmp_path / "out", "--capture", "1", *flags)
    assert code != 0
    assert match in errors
