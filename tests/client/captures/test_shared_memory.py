"""Reads through shared memory, with stores in processes of their own: the same rows, and what happens at a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import residuum
from residuum.transport import shared_memory
from residuum.v1 import store_pb2
from tests.client.support.running_store import ROOT, RunningStore
from tests.store.support import POST, Client, describe, make_chunk, row

pytestmark = pytest.mark.usefixtures("shared_memory")

WIDTH, LAYERS, PROMPT, BLOCK = 1024, range(8), 512, 32


def write(client: Client, name: str, **fields: object) -> None:
    """Store a capture of 16 chunks, of 1 MiB each."""
    client.open(describe(name, layers=LAYERS, prompt=PROMPT, width=WIDTH, **fields))
    blocks = (range(first, first + BLOCK) for first in range(0, PROMPT, BLOCK))
    client.append([make_chunk(LAYERS, block, width=WIDTH) for block in blocks], name)
    client.seal(name, generated=[1])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    running = RunningStore(tmp_path_factory.mktemp("store"), max_bytes="1GiB")
    client = Client(running.port)
    for name in ("a", "b", "c"):
        write(client, name)
    client.close()
    yield running
    running.stop()


def expected(layer: int, positions: range = range(PROMPT)) -> np.ndarray:
    return np.array([row((0, POST, layer, position), WIDTH) for position in positions])


def is_right(acts: residuum.Activations, layers: object = LAYERS) -> bool:
    return all(np.array_equal(acts[layer], expected(layer)) for layer in layers)


def client_of(store: RunningStore, **options: object) -> residuum.Client:
    return residuum.Client("127.0.0.1:1", store=store.endpoint, **options)


def placed_bytes(client: residuum.Client) -> int:
    """Return the bytes that came through memories that wait for their next read."""
    stores = client._memories._stores.values()
    return sum(memory._taken for store in stores for memory in store.idle)


class TestReads:
    def test_one_capture_again_and_again_in_one_memory(self, filled):
        with client_of(filled) as client:
            for _ in range(3):
                assert is_right(client.activations("a"))
            assert placed_bytes(client) >= 3 * len(LAYERS) * PROMPT * WIDTH * 4
            assert [state.count for state in client._memories._stores.values()] == [1]

    def test_without_it_the_rows_are_the_same(self, filled, monkeypatch):
        with client_of(filled, shared_memory=False) as client:
            assert is_right(client.activations("a"))
            assert "shared_memory=False" in client.shared_memory_problems()[filled.endpoint]
        monkeypatch.setenv("RESIDUUM_SHARED_MEMORY", "off")
        with client_of(filled) as client:
            assert is_right(client.activations("a"))
            assert "RESIDUUM_SHARED_MEMORY" in client.shared_memory_problems()[filled.endpoint]
            assert not placed_bytes(client)

    def test_parts_of_many_captures(self, filled):
        with client_of(filled) as client:
            found = client.activations(["a", "b", "c"], layers=[2, 5])
            assert len(found) == 3
            assert all(is_right(acts, [2, 5]) for acts in found)
            assert placed_bytes(client) == 3 * 2 * PROMPT * WIDTH * 4

    def test_pieces_stay_as_they_came(self, filled):
        """A piece must not lie in the memory, which later rows overwrite."""
        with client_of(filled) as client:
            pieces = list(client.follow("a"))
            for piece in pieces:
                first, last = int(piece.positions[0]), int(piece.positions[-1])
                np.testing.assert_array_equal(piece.rows, expected(piece.layer, range(first, last + 1)))
            assert sum(len(piece.rows) for piece in pieces) == len(LAYERS) * PROMPT

    def test_rows_of_a_dataset_stay_as_they_came(self, filled):
        from residuum.captures.row_stream import RowChoice, stream_rows

        with client_of(filled) as client:
            choice = RowChoice(None, None, None, None, allow_partial=False)
            rows = list(stream_rows(client, ["a", "b"], [0, 1], choice, 2, lambda _: None))
            assert sum(len(item.rows) for item in rows) == 2 * len(LAYERS) * PROMPT
            for item in rows:
                positions = range(int(item.positions[0]), int(item.positions[-1]) + 1)
                np.testing.assert_array_equal(item.rows, expected(item.layer, positions))

    def test_an_export(self, filled, tmp_path):
        with client_of(filled) as client:
            client.export("a", tmp_path / "a.safetensors")
            assert placed_bytes(client) == len(LAYERS) * PROMPT * WIDTH * 4
        assert is_right(residuum.Activations.from_safetensors(tmp_path / "a.safetensors"))

    async def test_asyncio(self, filled):
        async with residuum.AsyncClient("127.0.0.1:1", store=filled.endpoint) as client:
            assert is_right(await client.activations("a"))
            both = await asyncio.gather(*(client.activations(name, layers=[1]) for name in "abcabcabc"))
            assert all(is_right(acts, [1]) for acts in both)
            assert await client.shared_memory_problems() == {filled.endpoint: ""}
            assert placed_bytes(client) > len(LAYERS) * PROMPT * WIDTH * 4
            (state,) = client._memories._stores.values()
            assert state.count == len(state.idle) <= 4

    async def test_a_task_that_is_cancelled_while_a_memory_opens_loses_none(self, filled, monkeypatch):
        opening, go_on, is_over = threading.Event(), threading.Event(), threading.Event()
        real_open, give_back = shared_memory._open, shared_memory.SharedMemories.give_back

        def slow(*arguments):
            opening.set()
            go_on.wait(30)
            return real_open(*arguments)

        def noted(*arguments, **options):
            give_back(*arguments, **options)
            is_over.set()

        monkeypatch.setattr(shared_memory, "_open", slow)
        monkeypatch.setattr(shared_memory.SharedMemories, "give_back", noted)
        async with residuum.AsyncClient("127.0.0.1:1", store=filled.endpoint) as client:
            task = asyncio.ensure_future(client.activations("a"))
            assert await asyncio.to_thread(opening.wait, 30)
            task.cancel()
            await asyncio.wait([task])
            go_on.set()
            assert await asyncio.to_thread(is_over.wait, 10)
            assert task.cancelled()
            (state,) = client._memories._stores.values()
            assert state.count == len(state.idle) == 1

    def test_reads_that_begin_at_the_same_time_open_no_more_memories_than_allowed(self, filled):
        with client_of(filled) as client:
            assert is_right(client.activations("a"))
            (state,) = client._memories._stores.values()
            opened = [client._memories.open(filled.endpoint, state.description) for _ in range(5)]
            assert [memory is not None for memory in opened] == [True, True, True, False, False]
            for memory in filter(None, opened):
                client._memories.give_back(memory, clean=True)
            assert state.count == len(state.idle) == 4

    def test_threads_share_a_client(self, filled):
        failures = []

        def read() -> None:
            failures.extend(name for name in "abc" if not is_right(client.activations(name)))

        with client_of(filled) as client:
            threads = [threading.Thread(target=read) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures

    def test_a_read_that_was_left_does_not_spoil_the_next_one(self, filled):
        with client_of(filled) as client:
            for _ in range(3):
                pieces = client.follow("a")
                next(iter(pieces))
                pieces.close()
            assert is_right(client.activations("b"))

    def test_a_reader_that_pauses_gets_everything(self, filled, monkeypatch):
        """Other reads use other memories; this one holds rows until it goes on."""
        with client_of(filled) as client:
            pieces = client.follow("a")
            count = len(next(pieces).rows)
            assert is_right(client.activations("b"))
            assert count + sum(len(piece.rows) for piece in pieces) == len(LAYERS) * PROMPT


class TestFallback:
    def test_a_store_that_offers_none(self, tmp_path, monkeypatch):
        monkeypatch.setenv("RESIDUUM_SHARED_MEMORY", "off")
        running = RunningStore(tmp_path, max_bytes="256MiB")
        monkeypatch.delenv("RESIDUUM_SHARED_MEMORY")
        try:
            with client_of(running) as client:
                assert "--shared-memory" in client.shared_memory_problems()[running.endpoint]
        finally:
            running.stop()

    def test_a_store_on_another_machine(self, filled, monkeypatch):
        """Its socket is not here, or is that of another store."""
        answers = iter([("/nowhere/store.sock", b"x"), None])
        described = shared_memory.SharedMemories.open

        def elsewhere(self, endpoint, description):
            changed = next(answers)
            if changed:
                description = store_pb2.DescribeStoreResponse(shared_memory_socket=changed[0], instance=changed[1])
            else:
                description.instance = bytes(16)
            return described(self, endpoint, description)

        monkeypatch.setattr(shared_memory.SharedMemories, "open", elsewhere)
        for why in ("is not here", "another store answers"):
            with client_of(filled) as client:
                assert is_right(client.activations("a"))
                assert why in client._memories.why_not(filled.endpoint)
                assert is_right(client.activations("b")), "and it is not tried again at once"

    def test_an_older_store_does_not_know_the_call(self, endpoint):
        """Neither does an inference service."""
        with residuum.Client(endpoint, store=endpoint) as client:
            assert "does not offer this call" in client.shared_memory_problems()[endpoint]


class TestKills:
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
    def test_a_store_that_ends_during_a_read(self, tmp_path, how):
        running = RunningStore(tmp_path, max_bytes="256MiB")
        writer = Client(running.port)
        write(writer, "a")
        writer.close()
        with client_of(running) as client:
            pieces = client.follow("a", timeout=60)
            found = [next(pieces)]
            running.stop(how)
            again = RunningStore(tmp_path, port=running.port, max_bytes="256MiB")
            try:
                found += pieces
                rows = sorted((piece.layer, position) for piece in found for position in piece.positions.tolist())
                assert rows == [(layer, position) for layer in LAYERS for position in range(PROMPT)]
                assert is_right(client.activations("a"))
                assert client.shared_memory_problems() == {again.endpoint: ""}
            finally:
                again.stop()

    def test_a_reader_that_is_killed_leaves_nothing_behind(self, filled):
        program = (
            "import residuum, sys\n"
            f"pieces = residuum.Client('127.0.0.1:1', store={filled.endpoint!r}).follow('a')\n"
            "next(pieces)\n"
            "print('reading', flush=True)\n"
            "sys.stdin.read()\n"
        )
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'client'}:{ROOT}"}
        reader = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert reader.stdout.readline() == b"reading\n"
        assert mappings(filled.process.pid)
        reader.kill()
        reader.wait()
        reader.stdin.close()
        reader.stdout.close()
        deadline = time.monotonic() + 20
        while mappings(filled.process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def mappings(pid: int) -> int:
    """Return how many memories of readers a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:residuum-read")
