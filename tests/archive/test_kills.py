"""The store is killed at each call to its archive, before and after the archive has handled it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from residuum.rpc.objects import ArchiveRefusedError, MissingObjectError, Objects
from residuum.v1 import capture_pb2, errors_pb2, store_pb2
from residuum.wire.rows.archive import CAPTURES, unpack_capture
from store_svc.archive.restore import main as restore_main
from tests.archive.s3 import Call, Proxy
from tests.archive.support import LAYERS, MOVED, PROMPT, capture, chunk_objects, stats, wait_for_state
from tests.store.support import Client, Process, failing_with, grid, serving
from tests.waiting import wait_for

Start = Callable[..., Process]

_MOST_CALLS = 20
"""More than the calls of one round."""


class Killer:
    """Kills a store when its archive gets a certain call. The archive handles the call before that, or never does."""

    def __init__(self, at: int, *, after: bool) -> None:
        self._left = at
        self._after = after
        self._lock = threading.Lock()
        self.store: Process | None = None
        self.has_killed = False

    def arm(self, proxy: Proxy, store: Process) -> None:
        self.store = store
        if self._after:
            proxy.after = self._fault
            proxy.before = self._drop_if_dead
        else:
            proxy.before = self._fault
            proxy.after = lambda _: None

    def _fault(self, call: Call) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                assert self.store is not None
                self.store.process.send_signal(signal.SIGKILL)
                self.store.process.wait()
                self.has_killed = True
        self._drop_if_dead(call)

    def _drop_if_dead(self, call: Call) -> None:
        if self.has_killed:
            call.drop()


@pytest.fixture
def objects(s3: Proxy, url: str) -> Objects:
    """The archive, past the proxy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port_of_server}")
        return Objects(url)


class Expected:
    """What a store must have."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.prompts: dict[str, int] = {}
        self.labelled: set[str] = set()
        self.deleted: set[str] = set()

    def is_archived(self) -> bool:
        """Tell whether the archive has all of this, and nothing else."""
        found = []
        for path in self.objects.list(CAPTURES):
            with contextlib.suppress(MissingObjectError):
                found.append(unpack_capture(self.objects.get(path)).manifest)
        ids = [item.description.capture_id for item in found]
        labelled = {item.description.capture_id for item in found if item.labels}
        is_right = sorted(ids) == sorted(self.prompts) and labelled == self.labelled
        return is_right and len(chunk_objects(self.objects)) == len(ids)

    def check(self, client: Client) -> None:
        """Check that the store has all of this, each row once, and nothing else."""
        for capture_id, prompt in self.prompts.items():
            cells, manifest = client.read(capture_id)
            assert cells == grid(LAYERS, range(prompt))
            assert bool(manifest.labels) == (capture_id in self.labelled)
        for capture_id in self.deleted:
            with failing_with(errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE):
                client.get(capture_id)
        listed = client.stub.ListCaptures(store_pb2.ListCapturesRequest(page_size=1000)).captures
        assert sorted(item.capture_id for item in listed) == sorted(self.prompts)


def check_archive(folder: Path, url: str, expected: Expected) -> None:
    """Check that what is in the archive is whole, as if the disk were lost now."""
    assert restore_main(["--archive", url, "--path", str(folder), "--shards", "1"]) == 0
    with serving(folder, archive=url) as (_, client):
        for item in client.stub.ListCaptures(store_pb2.ListCapturesRequest(page_size=1000)).captures:
            prompt = expected.prompts.get(item.capture_id, PROMPT)  # others were deleted just before
            assert client.read(item.capture_id)[0] == grid(LAYERS, range(prompt))


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_store_that_is_killed_at_any_call_loses_and_doubles_nothing(
    tmp_path: Path, start: Start, url: str, s3: Proxy, objects: Objects, *, after: bool
) -> None:
    flags = ("--archive", url, "--archive-keep-bytes", "0", "--grace-seconds", "0.2")
    expected = Expected(objects)
    store = start(*flags)
    for at in range(1, _MOST_CALLS + 1):
        kept, deleted, new, newer = (f"{name}{at}" for name in ("kept", "deleted", "new", "newer"))
        capture(store.client, kept)
        capture(store.client, deleted)
        wait_for_state(store.client, MOVED, [kept, deleted])
        # The archive is away while all of this is acknowledged. Then the store has all of it to do.
        s3.before = lambda call: call.answer(503, "SlowDown")
        store.client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=deleted))
        label = capture_pb2.Label(name="split", text="train")
        store.client.stub.LabelCapture(store_pb2.LabelCaptureRequest(capture_id=kept, labels=[label]))
        capture(store.client, new, prompt=40)
        capture(store.client, newer, prompt=5)
        expected.prompts |= {kept: 4, new: 40, newer: 5}
        expected.labelled.add(kept)
        expected.deleted.add(deleted)
        killer = Killer(at, after=after)
        killer.arm(s3, store)
        wait_for(lambda killer=killer: killer.has_killed or expected.is_archived(), "end of the round", 60)
        if not killer.has_killed:
            break
        store.client.close()
        s3.work()
        check_archive(tmp_path / f"lost{at}", url, expected)
        store = start(*flags)
        moved = len(expected.prompts)
        wait_for(lambda client=store.client, moved=moved: stats(client).captures_moved == moved, "copies", 60)
        wait_for(expected.is_archived, "the right objects", 60)
        expected.check(store.client)
    else:
        pytest.fail("a round has more calls than expected")
    assert at > 6, "the store was killed at too few calls"
    s3.work()
    store.end(signal.SIGKILL)
    shutil.rmtree(tmp_path / "store")
    assert restore_main(["--archive", url, "--path", str(tmp_path / "store"), "--shards", "1"]) == 0
    expected.check(start(*flags).client)


def test_a_start_that_fails_at_any_call_can_be_repeated(tmp_path: Path, url: str, s3: Proxy) -> None:
    """The first calls to an archive check it, and make it this store's."""
    for at in range(1, 7):
        left = [at]

        def fault(call: Call, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] <= 0:
                call.answer(403, "AccessDenied")

        s3.before = fault
        with contextlib.suppress(ArchiveRefusedError), serving(tmp_path / "store", archive=url):
            break
    assert at > 4, "a start has fewer calls than expected"
    s3.work()
    with serving(tmp_path / "store", archive=url, archive_keep_bytes=0) as (_, client):
        capture(client)
        wait_for_state(client, MOVED)
        assert client.read()[0] == grid(LAYERS, range(4))
