"""What a job does where services differ, refuse prompts, or have little room."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
import warnings

import ml_dtypes
import numpy as np
import pytest

import residuum
from inference_svc.requests.concurrency import Places
from residuum._async.client import AsyncClient
from residuum.extraction.folder import JobFolder
from residuum.extraction.inputs.packing import PackedItems
from residuum.extraction.running.runner import Runner
from residuum.extraction.running.services import Services
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, tensor_pb2
from svc_common.security.tokens_file import Limits
from tests.client.extraction.test_extract import check_rows, files, job_id, write_prompts
from tests.client.support.extraction_files import write_extraction
from tests.client.support.peer import HIDDEN, POST, RunningPeer, rows
from tests.store.support import serving
from tests.store.wide import MIB, append_until_full, open_wide
from tests.waiting import wait_for

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


class Busy:
    """The real service's count of requests, for the threads of the peer; `theirs` are those of others.

    Its first requests run until it has had `at_once` and has refused `refusing`, however slow the machine is.
    """

    def __init__(self, total, *, quota=None, theirs=0, at_once=0, refusing=0):
        self.lock, self.refused, self.most = threading.Condition(), 0, 0
        self.at_once, self.refusing = at_once, refusing
        limits = Limits(max_requests=quota)
        self.places = Places(total, lambda tenant: limits)
        self.others = contextlib.ExitStack()
        for _ in range(theirs):
            self.others.enter_context(self.places.taken("them"))

    @contextlib.contextmanager
    def __call__(self):
        mine = contextlib.ExitStack()
        with self.lock:
            try:
                mine.enter_context(self.places.taken("me"))
            except Failure:
                self.refused += 1
                self.lock.notify_all()
                raise
            self.most = max(self.most, self.places.num_taken)
            self.lock.notify_all()
            enough = self.lock.wait_for(lambda: self.most >= self.at_once and self.refused >= self.refusing, 60)
            assert enough, f"had {self.most} at once, and refused {self.refused}"
        try:
            time.sleep(0.02)
            yield
        finally:
            with self.lock:
                mine.close()


def store_stats(**facts):
    """The statistics of a store at s:1."""
    return residuum.StoreStats("s:1", {}, 0, 0, 0, 0, "", **facts)


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


# ------------------------------------------------------------------------------------- services that refuse prompts


@pytest.mark.parametrize("busy", [{"total": 5, "theirs": 2}, {"total": 99, "quota": 3}])
async def test_a_job_sends_fewer_prompts_at_once_if_a_service_refuses_some(
    client, peer, prompts, tmp_path, monkeypatch, busy
):
    monkeypatch.setattr("residuum.extraction.running.service._GROWTH_SECONDS", 600.0)  # it does not try more later
    peer.script.places = Busy(**busy, at_once=3 + busy.get("theirs", 0), refusing=13)
    found = await client.extract(prompts, tmp_path / "out", capture=WHAT, max_concurrency=16, progress=False)
    check_rows(found, 40)
    assert found.summary.failed == 0
    assert peer.script.places.most == 3 + busy.get("theirs", 0)
    assert peer.script.places.refused < 30  # each of the first prompts that are too many, and few later ones


async def test_a_refused_prompt_goes_to_another_service(client, peer, second, prompts, tmp_path):
    peer.script.places, second.servicer.script.places = Busy(1), Busy(8, at_once=5)
    found = await client.extract(
        prompts, tmp_path / "out", capture=WHAT, max_concurrency=8, endpoints=[second.endpoint], progress=False
    )
    check_rows(found, 40)
    assert second.servicer.script.places.most > 4
    assert peer.script.places.most == 1


async def test_a_service_that_is_full_of_others_requests_is_waited_for(client, peer, prompts, tmp_path):
    peer.script.places = busy = Busy(4, theirs=4)
    warned = pytest.warns(
        residuum.OutageWarning, match="takes no prompts at the moment: 4 requests already run or wait"
    )

    def others_end():
        wait_for(lambda: len(warned), "the job tells that it waits")
        with busy.lock:
            busy.others.close()

    thread = threading.Thread(target=others_end)
    thread.start()
    with warned:
        found = await client.extract(prompts, tmp_path / "out", capture=WHAT, max_concurrency=8, progress=False)
    thread.join()
    check_rows(found, 40)
    assert busy.most > 1  # it gets more again


@pytest.mark.filterwarnings("ignore::residuum.OutageWarning")
@pytest.mark.parametrize(
    ("busy", "kind_of_error"),
    [({"total": 2, "theirs": 2}, residuum.LimitReached), ({"total": 9, "quota": 0}, residuum.QuotaExceeded)],
)
async def test_a_service_that_refuses_every_prompt_ends_the_job(
    client, peer, prompts, tmp_path, busy, kind_of_error
):  # fmt: skip
    peer.script.places = Busy(**busy)
    began = time.monotonic()
    with pytest.raises(kind_of_error, match="run or wait") as caught:
        await client.extract(prompts, tmp_path / "out", capture=WHAT, timeout=1.0, progress=False)
    assert 1.0 <= time.monotonic() - began < 60, "it did not wait as long as without a timeout, 300 s"
    assert "more room" not in str(caught.value)
    assert peer.script.places.refused < 50  # each prompt once, and then one at a time with pauses


@pytest.fixture
def full(tmp_path):
    """A real store that is full, and a scripted inference service whose captures go there."""
    with serving(tmp_path / "full", max_bytes=16 * MIB) as (_, store):
        open_wide(store, "theirs")
        append_until_full(store, "theirs")
        running = RunningPeer(store.target)
        yield running
        running.stop()


async def test_a_full_store_is_waited_for(make, full, prompts, tmp_path):
    client = make(full.endpoint, timeout=10)
    warned = pytest.warns(residuum.OutageWarning, match="at the moment: The store is full.*more room.*up to 300 s")

    def delete():
        wait_for(lambda: len(warned), "the job tells that it waits")
        with residuum.Client(full.endpoint) as operator:
            operator.delete("theirs")

    thread = threading.Thread(target=delete)
    thread.start()
    with warned:
        found = await client.extract(prompts, tmp_path / "out", capture=WHAT, max_concurrency=8, progress=False)
    thread.join()
    check_rows(found, 40)
    assert found.summary.failed == 0


@pytest.mark.filterwarnings("ignore::residuum.OutageWarning")
async def test_a_store_that_stays_full_ends_the_job_which_continues(make, full, prompts, tmp_path):
    client, began = make(full.endpoint, timeout=10), time.monotonic()
    job = {"capture": WHAT, "on_error": "skip", "max_concurrency": 8, "progress": False}
    with pytest.raises(residuum.StoreFull, match=r"store is full.*smaller max_concurrency\.$"):
        await client.extract(prompts, tmp_path / "out", timeout=1.0, **job)
    assert 1.0 <= time.monotonic() - began < 60, "it did not wait as long as without a timeout, 300 s"
    await client.delete("theirs")
    check_rows(await client.extract(prompts, tmp_path / "out", **job), 40)


@pytest.mark.filterwarnings("ignore::residuum.OutageWarning")
async def test_captures_that_were_read_make_room_for_one_that_is_sent_again(
    client, peer, prompts, tmp_path, monkeypatch
):
    """The last capture of a read is lost. The store has room again when those before it are in files and deleted."""
    out, read, lost = tmp_path / "out", Runner._read_captures, []

    async def some_lost(runner, ended):
        found = await read(runner, ended)
        if not lost and len(found) > 1:
            lost.append(ended[-1].item.index)
            del found[ended[-1].reply.request_id]
        return found

    @contextlib.contextmanager
    def room():
        if lost and len(list(out.glob("rows-*.safetensors"))) < lost[0]:
            raise Failure(Reason.ERROR_REASON_STORE_FULL, "The store is full.")
        yield

    monkeypatch.setattr(Runner, "_read_captures", some_lost)
    peer.script.places = room
    found = await client.extract(
        prompts, out, capture=WHAT, shard_bytes=1, max_concurrency=40, timeout=5.0, progress=False
    )
    check_rows(found, 40)
    assert lost


class TooLittle:
    """Refuses prompts that need more than all that a service has of something. Those before prompt `first` do not."""

    def __init__(self, limit, first=0, **more):
        self.limit, self.left, self.refused, self.more = limit, first, 0, more
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self):
        with self.lock:
            self.left -= 1
            if self.left < 0:
                self.refused += 1
                message = "The request needs 5, but there are at most 2."
                sizes = {"needed": 5, "allowed": 2, **self.more}
                raise Failure(Reason.ERROR_REASON_LIMIT_REACHED, message, limit=self.limit, **sizes)
        yield


@pytest.mark.filterwarnings("error::residuum.OutageWarning")
@pytest.mark.parametrize(
    ("limit", "more"),
    [
        ("max_active_vectors", {}),
        ("score_mib", {}),
        ("score_mib", {"needed_by_prompt": 0}),
        ("score_mib", {"needed_by_prompt": 2}),  # no prompt is short enough
    ],
)
async def test_a_refusal_that_can_never_pass_ends_the_job_at_once(client, peer, prompts, tmp_path, limit, more):
    peer.script.places = TooLittle(limit, **more)
    with pytest.raises(residuum.LimitReached, match="at most 2") as caught:
        await client.extract(
            prompts, tmp_path / "out", capture=WHAT, max_concurrency=4, on_error="skip", timeout=10.0, progress=False
        )
    assert not caught.value.may_pass
    assert peer.script.places.refused < 20, "no prompt was sent again, and most were not sent at all"


@pytest.mark.filterwarnings("error::residuum.OutageWarning")
async def test_a_prompt_that_is_too_long_for_the_scores_fails_alone(client, peer, prompts, tmp_path):
    peer.script.places = TooLittle("score_mib", first=38, needed_by_prompt=3)
    found = await client.extract(
        prompts, tmp_path / "out", capture=WHAT, max_concurrency=1, on_error="skip", timeout=10.0, progress=False
    )
    assert [prompt["failed"]["reason"] for prompt in found.failures] == ["LIMIT_REACHED"] * 2


@pytest.mark.filterwarnings("ignore::residuum.OutageWarning")
async def test_a_job_waits_while_a_prompt_runs_longer_than_its_patience(endpoint, monkeypatch):
    monkeypatch.setattr("residuum.extraction.running.services.LONGEST_PAUSE_SECONDS", 0.1)
    services = Services([AsyncClient(endpoint)], 2, 0.2)
    await services.begin()
    async with services.slot() as service:
        services.note_refused(service, residuum.LimitReached("full"))
    looks, check = [], services._check_patience
    services._check_patience = lambda now, *more: (looks.append(now), check(now, *more))
    async with services.slot():
        waiting = asyncio.ensure_future(contextlib.AsyncExitStack().enter_async_context(services.slot()))
        # It looks whether it has waited too long, and would raise.
        await asyncio.to_thread(wait_for, lambda: looks and looks[-1] - service.away_since > 0.2, "the patience to end")
        assert not waiting.done()
    await asyncio.wait_for(waiting, 30)
    await services.close()


@pytest.mark.parametrize(
    ("reason", "limit", "advises"),
    [
        (Reason.ERROR_REASON_STORE_FULL, "", True),
        (Reason.ERROR_REASON_QUOTA_EXCEEDED, "max_bytes", True),
        (Reason.ERROR_REASON_QUOTA_EXCEEDED, "max_sae_bytes", False),
    ],
)
async def test_a_job_waits_for_room_in_a_store_alone_and_gives_advice(
    client, peer, prompts, tmp_path, reason, limit, advises
):
    peer.script.failures = [None, *[Failure(reason, "No.", limit=limit)] * 99]
    with (
        pytest.warns(residuum.OutageWarning) if advises else contextlib.nullcontext(),
        pytest.raises(residuum.ResourceExhausted, match=r"^No\.") as caught,
    ):
        await client.extract(prompts, tmp_path / "out", capture=WHAT, timeout=0.5, progress=False)
    assert ("more room" in str(caught.value)) == advises


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (store_stats(why_full="the disk is full"), r"The job waits: the store s:1 is full, because the disk is full\."),
        (residuum.Unavailable("The store s:1 does not answer."), r"The job waits: The store s:1 does not answer\."),
        (None, r"The job waits: .* or one of its stores does not answer\."),
    ],
)
async def test_a_job_that_waits_for_a_store_says_so_once(client, peer, prompts, tmp_path, monkeypatch, trouble, told):
    """The captures do not end until the store has been asked a few times after the warning."""
    monkeypatch.setattr("residuum.extraction.running.store_watch._QUIET_SECONDS", 0.05)
    asked, peer.script.delay_seal = [], threading.Event()

    async def stats(_):
        asked.append(trouble)
        if len(asked) > 3:
            peer.script.delay_seal.set()
            return [store_stats()]
        if trouble is None:
            await asyncio.sleep(60)
        if isinstance(trouble, Exception):
            raise trouble
        return [trouble]

    monkeypatch.setattr(AsyncClient, "stats", stats)
    commit, goes_on = JobFolder.commit, threading.Event()
    monkeypatch.setattr(JobFolder, "commit", lambda *arguments: (goes_on.wait(30), commit(*arguments))[1])
    warned = pytest.warns(residuum.OutageWarning)
    thread = threading.Thread(target=lambda: (wait_for(lambda: len(warned) > 1, "it goes on"), goes_on.set()))
    thread.start()
    with warned:
        found = await client.extract(prompts, tmp_path / "out", capture=WHAT, max_concurrency=40, progress=False)
    thread.join()
    check_rows(found, 40)
    first, second = (str(warning.message) for warning in warned)
    assert re.match(told, first)
    assert second == "The job goes on."


async def test_a_job_that_waits_for_something_else_says_nothing(client, peer, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("residuum.extraction.running.store_watch._QUIET_SECONDS", 0.02)
    asked, peer.script.delay_seal = [], threading.Event()

    async def stats(_):
        asked.append(store_stats())
        if len(asked) > 2:
            peer.script.delay_seal.set()
        return asked[-1:]

    monkeypatch.setattr(AsyncClient, "stats", stats)
    with warnings.catch_warnings(record=True) as warned:
        check_rows(await client.extract(prompts, tmp_path / "out", capture=WHAT, progress=False), 40)
    assert (len(asked) > 2, warned) == (True, [])


async def test_one_other_service_continues(client, peer, second, prompts, tmp_path):
    peer.script.failures = [None, Failure(Reason.ERROR_REASON_STORE_UNREACHABLE, "No store.")]
    with pytest.warns(residuum.OutageWarning, match=r"until it answers again\. The other service continues\. No store"):
        await client.extract(
            prompts, tmp_path / "out", capture=WHAT, endpoints=[second.endpoint], max_concurrency=2, progress=False
        )


PACKED = {"pack": True, "context_length": 2, "separator": None, "on_error": "skip"}


@pytest.mark.parametrize(
    ("category", "source", "choice", "count"),
    [
        (residuum.OutageWarning, ["a", "b"], {}, 2),  # it is away, and answers again
        (residuum.LeftOutWarning, [[5, 6], [-1]], PACKED, 1),
    ],
)
async def test_the_warnings_of_a_job_are_where_the_user_runs_it(
    endpoint, peer, tmp_path, category, source, choice, count
):  # fmt: skip
    """Not in the thread and the tasks that run it."""
    more = {"capture": WHAT, "progress": False, **choice}
    away = [None, Failure(Reason.ERROR_REASON_STORE_UNREACHABLE, "No store.")] * (category is residuum.OutageWarning)

    def run(client):
        client.extract(source, tmp_path / "sync", **more)

    async def run_async(client):
        await client.extract(source, tmp_path / "async", **more)

    peer.script.failures = list(away)
    with residuum.Client(endpoint, timeout=30) as client, pytest.warns(category) as warned:
        run(client)
    assert [(item.filename, item.lineno) for item in warned] == [(__file__, run.__code__.co_firstlineno + 1)] * count
    peer.script.failures = list(away)
    async with AsyncClient(endpoint, timeout=30) as client:
        with pytest.warns(category) as warned:
            await run_async(client)
    line = run_async.__code__.co_firstlineno + 1
    assert [(item.filename, item.lineno) for item in warned] == [(__file__, line)] * count


# ---------------------------------------------------------------------------------------------------- a slow disk


@pytest.mark.parametrize(("concurrency", "unread"), [(1, 4), (2, 4), (6, 6)])
async def test_few_captures_wait_in_the_store_for_a_slow_disk(
    endpoint, peer, tmp_path, monkeypatch, concurrency, unread
):  # fmt: skip
    """Two captures of 96 bytes fill a file. Two files are being written, and the next one is full."""
    commit, may_write = JobFolder.commit, threading.Event()
    monkeypatch.setattr(JobFolder, "commit", lambda *arguments: (may_write.wait(120), commit(*arguments))[1])
    written, waiting = Runner._written, []

    async def noted(runner, left):
        waiting[:] = [runner] if len(runner._writing) > left else []
        await written(runner, left)

    def nothing_moves():
        """Whether the job waits for the disk, starts no prompt, and has an answer to each that it has started."""
        return any(
            runner._unread >= runner._most_unread() and all(task.done() for task in tuple(runner._waiting))
            for runner in waiting
        )

    monkeypatch.setattr(Runner, "_written", noted)
    async with residuum.AsyncClient(endpoint) as client:
        job = asyncio.ensure_future(
            client.extract(
                ["a b c"] * 40, tmp_path / "out", capture=WHAT, shard_bytes=192, max_concurrency=concurrency,
                progress=False,
            )
        )  # fmt: skip
        most = 2 + 2 + 2 + unread
        try:
            await asyncio.to_thread(wait_for, nothing_moves, "the job waits for the disk")
            assert peer.calls.count("Generate") == most
        finally:
            may_write.set()
        assert len(await job) == 120


# ---------------------------------------------------------------------------- the documents that packing reads first


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """A file of documents, each of which takes 2 ms to read."""
    tokens_of = PackedItems._tokens_of
    monkeypatch.setattr(PackedItems, "_tokens_of", lambda *arguments: (time.sleep(0.002), tokens_of(*arguments))[1])
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": [2, 3]}\n' * 300)
    flags = ["--capture", 1, "--pack", "--context-length", 100, "--separator", "none"]
    return [path, "--output", tmp_path / "out", *flags]


def test_the_command_shows_how_many_documents_it_has_read(cli, documents, monkeypatch):
    monkeypatch.setattr("residuum.extraction.progress._SECONDS", 0.02)
    code, _, errors = cli("extract", *documents)
    assert code == 0
    shown = [int(count) for count in re.findall(r"reading documents: (\d+) of 300", errors)]
    assert len(shown) > 5
    assert shown == sorted(shown)
    assert shown[0] < 100
    assert 200 < shown[-1] <= 300


def test_an_estimate_includes_the_time_to_read_the_documents(cli, documents):
    code, printed, _ = cli("extract", *documents, "--dry-run", "--json")
    assert code == 0
    estimate = json.loads(printed)
    assert estimate["prompts"] == 6
    assert estimate["seconds"] > 300 * 0.002
