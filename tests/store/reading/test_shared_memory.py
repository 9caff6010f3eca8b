"""Reads through shared memory, with peers that keep to the rules and peers that do not."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import residuum
from residuum.rpc.errors import Reason
from residuum.rpc.shared_memory import create_memory, give_memory
from residuum.v1 import capture_pb2, store_pb2
from residuum.wire.limits import TARGET_CHUNK_BYTES
from residuum.wire.rows.frames import checksum, layer_parts, placed_append
from residuum.wire.rows.shared_memory import (
    MIN_PLACED_BYTES,
    MIN_READ_BYTES,
    READ,
    SEAL_FUTURE_WRITE,
    WRITE,
    Hello,
    SharedMemoryError,
    encode_released,
)
from store_svc.server import Store
from store_svc.shared_memory import listener as listener_module
from store_svc.shared_memory import memories as memories_module
from store_svc.shared_memory.memories import MAX_MEMORIES, MAX_READ_BYTES_IN_ALL
from tests.store.support import (
    COMPLETE,
    POST,
    Client,
    Rows,
    describe,
    failing_with,
    grid,
    make_chunk,
    rejections,
    row,
    serving,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("shared_memory")

WIDTH, LAYERS, PROMPT, BLOCK = 1024, range(8), 256, 32
CHUNK_BYTES = len(LAYERS) * BLOCK * WIDTH * 4
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
WRITE_SEALS = SEALS | SEAL_FUTURE_WRITE


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Store, Client]]:
    with serving(tmp_path / "store", max_bytes="256MiB") as (store, client):
        yield store, client


def write(client: Client, name: str = "a", *, width: int = WIDTH) -> None:
    """Store a capture of 8 chunks, of 1 MiB each."""
    client.open(describe(name, layers=LAYERS, prompt=PROMPT, width=width))
    blocks = [range(first, first + BLOCK) for first in range(0, PROMPT, BLOCK)]
    client.append([make_chunk(LAYERS, block, width=width) for block in blocks], name)
    assert client.seal(name, generated=[1]).state == COMPLETE


class Peer:
    """A reader with a memory."""

    def __init__(self, store: Store, client: Client, size: int = MIN_READ_BYTES) -> None:
        answer = client.stub.DescribeStore(store_pb2.DescribeStoreRequest())
        descriptor = create_memory(size)
        self.given = give_memory(answer.shared_memory_socket, answer.instance, READ, descriptor)
        self.memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(descriptor)
        self._client = client
        self.placed = self.in_message = 0
        self.end = 0

    def read(self, name: str = "a", *, release: bool = True, **fields: object) -> set[tuple[int, int, int, int]]:
        """Read rows and check their values; return the cells."""
        rows = Rows()
        request = store_pb2.ReadChunksRequest(capture_id=name, shared_memory_key=self.given.key, **fields)
        for answer in self._client.stub.ReadChunks(request, timeout=60):
            self._take(rows, answer, release=release)
        return rows.cells

    def _take(self, rows: Rows, answer: store_pb2.ReadChunksResponse, *, release: bool) -> None:
        assert not (answer.HasField("chunk") and answer.placed_chunks), "readers see only one of them"
        if answer.HasField("chunk"):
            rows.take(answer.chunk)
            self.in_message += 1
        for placed in answer.placed_chunks:
            rows.take(self.chunk(placed))
            self.placed += 1
            self.end = placed.end
            if release:
                assert self.given.send(encode_released(self.end))

    def chunk(self, placed: store_pb2.PlacedChunk) -> capture_pb2.Chunk:
        payload = self.memory[placed.offset : placed.offset + placed.num_bytes]
        return capture_pb2.Chunk(header=placed.header, crc32c=placed.crc32c, payload=payload)


EVERY = grid(LAYERS, range(PROMPT))


class TestReads:
    def test_whole_chunks_lie_in_the_memory_which_is_used_as_a_ring(self, running):
        write(running[1])
        peer = Peer(*running)
        for _ in range(3):  # 24 MiB through 8 MiB
            assert peer.read() == EVERY
        assert (peer.placed, peer.in_message) == (24, 0)
        assert running[0]._metrics.shared_memory_read_bytes._value.get() == 24 * CHUNK_BYTES

    def test_slices_are_cut_into_the_memory_and_small_ones_come_in_messages(self, running):
        write(running[1])
        peer = Peer(*running)
        assert peer.read(layers=[3, 5]) == grid([3, 5], range(PROMPT))
        assert (peer.placed, peer.in_message) == (8, 0)
        assert peer.read(layers=[1, 6], positions=last(31)) == grid([1, 6], range(PROMPT - 31, PROMPT))
        assert (peer.placed, peer.in_message) == (9, 0)
        assert peer.read(layers=[3], positions=last(4)) == grid([3], range(PROMPT - 4, PROMPT))
        assert 4 * WIDTH * 4 < MIN_PLACED_BYTES
        assert (peer.placed, peer.in_message) == (9, 1)

    def test_a_large_memory_of_small_payloads_that_are_released_one_by_one(self, running):
        """A socket holds fewer releases than this memory holds payloads."""
        client, count = running[1], 700
        client.open(describe(layers=range(2), prompt=8 * count, width=WIDTH))
        client.append([make_chunk(range(2), range(8 * at, 8 * at + 8), width=WIDTH) for at in range(count)])
        client.seal(generated=[1])
        peer = Peer(*running, size=64 << 20)
        request = store_pb2.ReadChunksRequest(capture_id="a", shared_memory_key=peer.given.key)
        for _ in range(2):
            answers = client.stub.ReadChunks(request, timeout=60)
            placed = [chunk for answer in answers for chunk in answer.placed_chunks if self.released(peer, chunk)]
            assert len(placed) == count

    @staticmethod
    def released(peer: Peer, chunk: store_pb2.PlacedChunk) -> bool:
        return peer.given.send(encode_released(chunk.end))

    def test_room_counts_as_soon_as_it_holds_a_payload(self, running):
        """What is read ahead takes room while the bytes of the message before are counted."""
        peer = Peer(*running)
        with running[0]._shared_memory.memories.reading(peer.given.key) as use:
            for kept, num_bytes in [(70_000, 70_000), (0, 70_000), (1 << 20, 70_000 + (1 << 20))]:
                before = use.num_bytes
                place, _ = use.take_room(1 << 20)
                assert use.num_bytes == before
                use.shorten(place, 1 << 20, kept)
                assert use.num_bytes == num_bytes
        peer.given.close()

    def test_many_captures(self, running):
        names = ["a", "b", "c"]
        for name in names:
            write(running[1], name)
        peer, rows = Peer(*running), {name: Rows() for name in names}
        request = store_pb2.ReadCapturesRequest(capture_ids=names, shared_memory_key=peer.given.key)
        for answer in running[1].stub.ReadCaptures(request, timeout=60):
            for part in answer.captures:
                assert not part.chunks
                for placed in part.placed_chunks:
                    rows[names[part.index]].take(peer.chunk(placed))
                    peer.given.send(encode_released(placed.end))
        assert [item.cells for item in rows.values()] == [EVERY] * 3

    def test_rows_of_an_open_capture(self, running):
        client = running[1]
        client.open(describe("a", layers=LAYERS, prompt=PROMPT, width=WIDTH))
        client.append([make_chunk(LAYERS, range(BLOCK), width=WIDTH)])
        peer = Peer(*running)
        assert peer.read() == grid(LAYERS, range(BLOCK))
        assert peer.placed == 1

    def test_one_read_at_a_time_uses_a_memory(self, running):
        write(running[1])
        peer = Peer(*running)
        request = store_pb2.ReadChunksRequest(capture_id="a", shared_memory_key=peer.given.key)
        first = running[1].stub.ReadChunks(request, timeout=60)
        next(first), next(first)
        second = list(running[1].stub.ReadChunks(request, timeout=60))
        assert not any(item.placed_chunks for item in second)
        assert sum(item.HasField("chunk") for item in second) == 8
        first.cancel()

    @pytest.mark.parametrize("key", [b"", bytes(16), b"x" * 100])
    def test_without_a_known_key_rows_come_in_messages(self, running, key):
        write(running[1])
        assert running[1].read(shared_memory_key=key)[0] == EVERY

    def test_a_damaged_chunk_is_noticed_by_the_reader(self, running, monkeypatch):
        """The store only copies whole chunks."""
        write(running[1])

        def copy_and_damage(target: np.ndarray, source: np.ndarray) -> None:
            target[:] = source
            target[0] ^= 1

        numpy = SimpleNamespace(copyto=copy_and_damage, frombuffer=np.frombuffer, uint8=np.uint8)
        monkeypatch.setattr("store_svc.reading.placing.np", numpy)
        refused = pytest.raises(residuum.DamagedCapture, match="do not match their checksum")
        with residuum.Client(store=running[1].target) as reader, refused:
            reader.activations("a")

    def test_a_damaged_chunk_of_which_a_part_is_read_is_noticed_by_the_store(self, running, monkeypatch):
        write(running[1])
        peer = Peer(*running)
        monkeypatch.setattr("store_svc.reading.stored_chunks.ChunkView.verify", lambda _: False)
        with pytest.raises(Exception, match="damaged"):
            peer.read(layers=[1])


def last(count: int) -> object:
    return span(PROMPT - count, PROMPT - 1)


def span(first: int, last: int) -> object:
    positions = store_pb2.ReadChunksRequest().positions
    positions.ranges.add(first=first, last=last)
    return positions


class TestPeersThatBreakRules:
    def test_one_that_releases_nothing_gets_the_rest_in_messages(self, running, monkeypatch):
        monkeypatch.setattr(memories_module, "_PATIENCE_SECONDS", 0.3)
        for name in "ab":
            write(running[1], name)
        peer = Peer(*running)
        for name in "ab":
            assert peer.read(name, release=False) == EVERY
        assert (peer.placed, peer.in_message) == (8, 8), "the memory is full, and the next read must not use it"
        assert peer.given.send(encode_released(peer.end))
        assert peer.read() == EVERY
        assert peer.placed == 16

    @pytest.mark.parametrize("change", [lambda end: end + 1, lambda end: end - 1, lambda _: 0, lambda _: 2**64 - 1])
    def test_a_release_of_what_it_does_not_hold_drops_the_memory(self, running, change):
        write(running[1])
        peer = Peer(*running)
        request = store_pb2.ReadChunksRequest(capture_id="a", shared_memory_key=peer.given.key)
        rows = Rows()
        for number, answer in enumerate(running[1].stub.ReadChunks(request, timeout=60)):
            peer._take(rows, answer, release=False)
            if number == 1:
                peer.given.send(encode_released(change(peer.end)))
        assert rows.cells == EVERY
        wait_for(lambda: not len(running[0]._shared_memory.memories))
        assert not peer.given.is_held()

    def test_a_release_between_reads_drops_the_memory(self, running):
        peer = Peer(*running)
        peer.given.send(encode_released(1))
        wait_for(lambda: not peer.given.is_held())

    def test_a_peer_that_closes_gives_its_memory_free_also_during_a_read(self, running):
        write(running[1])
        memories, peer = running[0]._shared_memory.memories, Peer(*running)
        request = store_pb2.ReadChunksRequest(capture_id="a", shared_memory_key=peer.given.key)
        answers = running[1].stub.ReadChunks(request, timeout=60)
        seen = [next(answers), next(answers)]
        peer.given.close()
        seen += answers
        assert sum(item.HasField("chunk") + len(item.placed_chunks) for item in seen) == 8
        wait_for(lambda: not len(memories) and not memories._read_bytes)


KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Flags of fallocate(2)."""


def fallocate(descriptor: int, mode: int, offset: int, size: int) -> int:
    call = ctypes.CDLL(None).fallocate
    return call(descriptor, mode, ctypes.c_long(offset), ctypes.c_long(size))


def memfd(size: int, *, seals: int = SEALS, allocate: bool = True, flags: int = 0) -> int:
    descriptor = os.memfd_create("peer", os.MFD_ALLOW_SEALING | flags)
    os.truncate(descriptor, size)
    if allocate and size:
        os.posix_fallocate(descriptor, 0, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@contextmanager
def connected(store: Store) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(20)
        connection.connect(store._shared_memory.path)
        yield connection


def answer_to(store: Store, data: bytes, descriptors: list[int]) -> bytes:
    """Send a first message and close the descriptors; return the store's answer, empty if it closes the connection."""
    with connected(store) as connection:
        socket.send_fds(connection, [data], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            return connection.recv(100)
        except ConnectionResetError:  # it was closed with unread data
            return b""


HELLO = Hello(READ, bytes(range(16))).encode()


class TestHandshake:
    def test_a_memory_as_it_must_be_is_taken(self, running):
        assert answer_to(running[0], HELLO, [memfd(MIN_READ_BYTES)]).startswith(b"residuum\1")
        assert answer_to(running[0], Hello(WRITE, bytes(16)).encode(), [memfd(4096, seals=WRITE_SEALS)])
        # Nothing is written into memory for writing, and it is not limited like that for reading.
        assert answer_to(running[0], Hello(WRITE, b"k" * 16).encode(), [memfd(128 << 20, seals=WRITE_SEALS)])

    @pytest.mark.parametrize(
        "make",
        [
            list,
            lambda: [memfd(MIN_READ_BYTES), memfd(MIN_READ_BYTES)],
            lambda: [memfd(4096) for _ in range(60)],
            lambda: [os.open("/dev/zero", os.O_RDWR)],
            lambda: list(os.pipe()[:1]),
            lambda: [os.open(".", os.O_RDONLY)],
            lambda: [memfd(MIN_READ_BYTES, seals=0)],
            lambda: [memfd(MIN_READ_BYTES, seals=fcntl.F_SEAL_GROW)],
            lambda: [memfd(MIN_READ_BYTES, seals=fcntl.F_SEAL_SHRINK)],
            lambda: [memfd(MIN_READ_BYTES, seals=SEALS | fcntl.F_SEAL_WRITE)],
            lambda: [memfd(MIN_READ_BYTES, seals=SEALS | fcntl.F_SEAL_SEAL)],
            lambda: [memfd(MIN_READ_BYTES, allocate=False)],
            lambda: [memfd(MIN_READ_BYTES - 1)],
            lambda: [memfd((64 << 20) + 4096)],
            lambda: [memfd(0)],
        ],
        ids=[
            "none", "two", "many", "a device", "a pipe", "a folder", "unsealed", "may shrink", "may grow",
            "read-only", "no further seals", "not allocated", "too small", "too large", "empty",
        ],
    )  # fmt: skip
    def test_another_memory_is_refused(self, running, make):
        assert answer_to(running[0], HELLO, make()) == b""
        assert not len(running[0]._shared_memory.memories)
        self.test_a_memory_as_it_must_be_is_taken(running)

    def test_a_memory_for_writing_must_keep_its_pages(self, running):
        hello = Hello(WRITE, bytes(16)).encode()
        assert answer_to(running[0], hello, [memfd(4096)]) == b""
        assert answer_to(running[0], hello, [memfd(1 << 20, seals=WRITE_SEALS, allocate=False)]) == b""

    def test_a_peer_cannot_free_pages_that_the_store_would_pay_for(self, running):
        descriptor = memfd(MIN_READ_BYTES)
        with connected(running[0]) as connection:
            socket.send_fds(connection, [HELLO], [descriptor])
            assert connection.recv(100)
            assert fallocate(descriptor, PUNCH_HOLE | KEEP_SIZE, 0, 4096) == -1
            assert os.fstat(descriptor).st_blocks * 512 == MIN_READ_BYTES
        os.close(descriptor)

    @pytest.mark.parametrize("data", [b"x", HELLO[:-1], HELLO + b"x", b"x" * 5000, HELLO[:9] + b"\7" + HELLO[10:]])
    def test_another_first_message_is_refused(self, running, data):
        assert answer_to(running[0], data, [memfd(MIN_READ_BYTES)]) == b""

    def test_a_key_names_one_memory(self, running):
        with connected(running[0]) as connection:
            first = memfd(MIN_READ_BYTES)
            socket.send_fds(connection, [HELLO], [first])
            os.close(first)
            assert connection.recv(100)
            assert answer_to(running[0], HELLO, [memfd(MIN_READ_BYTES)]) == b""

    def test_all_memories_for_reading_have_a_limit(self, running):
        size = 64 << 20
        peers = [Peer(*running, size=size) for _ in range(MAX_READ_BYTES_IN_ALL // size)]
        with pytest.raises(SharedMemoryError, match="refused"):
            Peer(*running, size=size)
        peers.pop().given.close()
        wait_for(lambda: running[0]._shared_memory.memories._read_bytes < MAX_READ_BYTES_IN_ALL)
        Peer(*running, size=size).given.close()
        for peer in peers:
            peer.given.close()

    def test_connections_have_a_limit_and_a_time(self, running, monkeypatch):
        monkeypatch.setattr(listener_module, "_HELLO_SECONDS", 0.5)
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(MAX_MEMORIES + 4)]
        for connection in silent:
            connection.connect(running[0]._shared_memory.path)  # without a timeout, it waits for the queue
            connection.settimeout(20)
        assert all(connection.recv(10) == b"" for connection in silent)
        assert answer_to(running[0], HELLO, [memfd(MIN_READ_BYTES)])
        for connection in silent:
            connection.close()


@pytest.fixture
def runtime_folder(monkeypatch):
    """The folder for sockets. A Unix socket's path has at most 107 bytes, and pytest's folders may be longer."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


class TestSocket:
    def test_it_is_for_this_user_only_and_is_removed_at_the_end(self, tmp_path, runtime_folder):
        with serving(tmp_path / "store") as (store, _):
            path = Path(store._shared_memory.path)
            assert path.parent == runtime_folder / f"residuum-{os.geteuid()}"
            assert path.parent.stat().st_mode & 0o777 == 0o700
            assert path.stat().st_mode & 0o777 == 0o600
        assert list(path.parent.iterdir()) == []

    def test_a_folder_of_others_is_not_used(self, tmp_path, runtime_folder):
        (runtime_folder / f"residuum-{os.geteuid()}").mkdir(mode=0o755)
        with serving(tmp_path / "store") as (store, client):
            assert store._shared_memory.path == ""
            assert not client.stub.DescribeStore(store_pb2.DescribeStoreRequest()).shared_memory_socket

    def test_sockets_of_killed_stores_are_replaced_and_those_of_others_are_not(self, tmp_path, runtime_folder):
        with serving(tmp_path / "first") as (first, _):
            stale = Path(first._shared_memory.path).with_name("store-1-stale.sock")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
                dead.bind(str(stale))
            with serving(tmp_path / "second"):
                assert not stale.exists()
                assert Path(first._shared_memory.path).exists()

    def test_a_path_of_the_operator(self, tmp_path):
        path = tmp_path / "s.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(path))
        with serving(tmp_path / "first", shared_memory=str(path)) as (first, client):
            assert first._shared_memory.path == str(path)
            Peer(first, client).given.close()
            with pytest.raises(OSError, match="another store"), serving(tmp_path / "second", shared_memory=str(path)):
                pass
        assert not path.exists()
        path.write_text("mine")
        with pytest.raises(OSError, match="not a socket"), serving(tmp_path / "third", shared_memory=str(path)):
            pass
        assert path.read_text() == "mine"
        with pytest.raises(OSError, match="too long"), serving(tmp_path / "f", shared_memory=f"/tmp/{'x' * 110}"):
            pass

    def test_off(self, tmp_path):
        with serving(tmp_path / "store", shared_memory="off") as (_, client):
            answer = client.stub.DescribeStore(store_pb2.DescribeStoreRequest())
            assert (answer.shared_memory_socket, len(answer.instance)) == ("", 16)

    def test_an_instance_is_new_at_each_start(self, tmp_path):
        seen = set()
        for _ in range(2):
            with serving(tmp_path / "store") as (_, client):
                seen.add(client.stub.DescribeStore(store_pb2.DescribeStoreRequest()).instance)
        assert len(seen) == 2


def test_an_answer_of_another_store_is_noticed(running):
    with pytest.raises(SharedMemoryError, match="another store"):
        give_memory(running[0]._shared_memory.path, bytes(16), READ, create_memory(MIN_READ_BYTES))


def test_rows_are_those_of_the_database(running):
    """The memory holds the stored bytes, so that their checksum holds too."""
    write(running[1])
    peer = Peer(*running)
    request = store_pb2.ReadChunksRequest(capture_id="a", shared_memory_key=peer.given.key)
    placed = [chunk for item in running[1].stub.ReadChunks(request) for chunk in item.placed_chunks]
    for item in placed[-7:]:
        assert checksum(peer.chunk(item).payload) == item.crc32c
        assert np.frombuffer(peer.chunk(item).payload, "<f4").shape == (len(LAYERS) * BLOCK * WIDTH,)
        assert item.header.site == POST


class TestAppends:
    """Messages that no shipper sends."""

    @pytest.fixture
    def writer(self, running: tuple[Store, Client]) -> Iterator[Callable[..., dict[int, int]]]:
        """Appends a placed chunk; returns the rejections."""
        _, client = running
        client.open(describe("a", layers=LAYERS, prompt=PROMPT, width=WIDTH))
        answer = client.stub.DescribeStore(store_pb2.DescribeStoreRequest())
        chunk = capture_pb2.Chunk.FromString(make_chunk(LAYERS, range(BLOCK), width=WIDTH))
        descriptor = memfd(2 << 20)
        os.pwrite(descriptor, chunk.payload, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
        given = give_memory(answer.shared_memory_socket, answer.instance, WRITE, descriptor)
        os.close(descriptor)

        def append(key: bytes = given.key, **changes: object) -> dict[int, int]:
            fields = {"header": chunk.header, "crc32c": chunk.crc32c, "offset": 4096, "num_bytes": CHUNK_BYTES}
            placed = store_pb2.PlacedChunk(**{**fields, **changes})
            return rejections(client.send([placed_append(1, "a", placed, key)]))

        yield append
        given.close()

    def test_a_placed_chunk_is_stored_as_one_in_a_message(self, running, writer):
        assert writer() == {}
        assert running[1].read()[0] == grid(LAYERS, range(BLOCK))
        assert writer() == {}, "a repeat is acknowledged"

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"crc32c": 1}, Reason.ERROR_REASON_CHECKSUM_MISMATCH),
            ({"offset": 4097}, Reason.ERROR_REASON_CHECKSUM_MISMATCH),
            ({"offset": (2 << 20) - 1}, Reason.ERROR_REASON_INVALID_FIELD),
            ({"offset": 2**64 - 1}, Reason.ERROR_REASON_INVALID_FIELD),
            ({"num_bytes": CHUNK_BYTES - 1}, Reason.ERROR_REASON_INVALID_FIELD),
            ({"num_bytes": 2**64 - 1}, Reason.ERROR_REASON_INVALID_FIELD),
            ({"num_bytes": 0}, Reason.ERROR_REASON_INVALID_FIELD),
            ({"header": None}, Reason.ERROR_REASON_INVALID_FIELD),
        ],
    )
    def test_a_chunk_that_is_not_there_is_rejected(self, running, writer, changes, reason):
        assert writer(**changes) == {1: reason}
        assert running[1].read()[0] == set()

    def test_an_unknown_memory_fails_the_stream(self, running, writer):
        reader = Peer(*running)
        for key in (b"", bytes(16), reader.given.key):
            with failing_with(Reason.ERROR_REASON_UNKNOWN_MEMORY):
                writer(key)


class TestLargeChunks:
    """Chunks that are too large for a message."""

    LARGE = range(44)
    """Layers of 128 KiB each: 5.5 MiB."""

    @pytest.fixture
    def write(self, running: tuple[Store, Client]) -> Iterator[Callable[..., dict[int, int]]]:
        """Appends one large chunk, and returns the rejections."""
        _, client = running
        answer = client.stub.DescribeStore(store_pb2.DescribeStoreRequest())
        assert answer.max_placed_chunk_bytes == 8 << 20
        given = []

        def write(
            layers: range = self.LARGE, width: int = WIDTH, name: str = "a", block: int = 0, **changes: object
        ) -> dict[int, int]:
            if not block:
                client.open(describe(name, layers=layers, prompt=BLOCK, width=width))
            positions = range(block * BLOCK, (block + 1) * BLOCK)
            chunk = capture_pb2.Chunk.FromString(make_chunk(layers, positions, width=width))
            descriptor = memfd(len(chunk.payload))
            os.pwrite(descriptor, chunk.payload, 0)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
            given.append(give_memory(answer.shared_memory_socket, answer.instance, WRITE, descriptor))
            os.close(descriptor)
            parts = layer_parts(chunk.header, memoryview(chunk.payload))
            fields = {"layer_crc32c": list(map(checksum, parts)), "num_bytes": len(chunk.payload), **changes}
            placed = store_pb2.PlacedChunk(header=chunk.header, crc32c=chunk.crc32c, **fields)
            return rejections(client.send([placed_append(1, name, placed, given[-1].key)]))

        yield write
        for memory in given:
            memory.close()

    def test_they_are_placed_whole_if_the_memory_is_large_enough(self, running, write):
        assert write() == {}
        peer = Peer(*running, size=16 << 20)
        assert peer.read() == grid(self.LARGE, range(BLOCK))
        assert (peer.placed, peer.in_message) == (1, 0)

    @pytest.mark.parametrize("layers", [[], range(3, 40)], ids=["whole", "most of it"])
    def test_others_get_them_in_parts(self, running, write, layers):
        assert write() == {}
        small = Peer(*running)
        assert small.read(layers=layers) == grid(layers or self.LARGE, range(BLOCK))
        assert small.placed == 0
        answers = list(running[1].stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="a", layers=layers)))
        sizes = [len(answer.chunk.payload) for answer in answers if answer.HasField("chunk")]
        assert sum(sizes) == len(layers or self.LARGE) * BLOCK * WIDTH * 4
        assert max(sizes) <= TARGET_CHUNK_BYTES
        assert len(sizes) == small.in_message == 3

    def test_of_many_captures(self, running, write):
        assert write() == {}
        with residuum.Client(store=running[1].target) as client:
            running[1].seal("a", generated=[1])
            for acts in (client.activations(["a"])[0], client.activations("a")):
                for layer in self.LARGE:
                    assert np.array_equal(acts[layer], [row((0, POST, layer, at), WIDTH) for at in range(BLOCK)])

    def test_no_chunk_waits_for_room_that_one_takes_which_is_not_sent_yet(self, running, write):
        """The second of these lies in the middle of the client's memory, and leaves no room for the third."""
        store, client = running
        layers, blocks = {"a": range(42), "b": self.LARGE}, {"a": 1, "b": 3}
        for name, count in blocks.items():
            for block in range(count):
                assert write(layers[name], name=name, block=block) == {}
            client.seal(name, generated=[(count - 1) * BLOCK + 1])
        with residuum.Client(store=client.target) as reader:
            found = reader.activations(list(blocks))
        assert [len(acts.positions) for acts in found] == [count * BLOCK for count in blocks.values()]
        placed = sum(len(layers[name]) * count for name, count in blocks.items()) * BLOCK * WIDTH * 4
        assert store._metrics.shared_memory_read_bytes._value.get() == placed

    def test_only_the_wanted_layers_are_compared_with_their_checksums(self, running, write):
        """The reader compares them: a slice has a checksum that follows from those of its layers."""
        wrong = [0] * len(self.LARGE)
        wrong[7] = checksum(np.array([row((0, POST, 7, at), WIDTH) for at in range(BLOCK)]).tobytes())
        assert write(layer_crc32c=wrong) == {}
        peer = Peer(*running, size=16 << 20)
        assert peer.read(layers=[7]) == grid([7], range(BLOCK))
        damaged = pytest.raises(residuum.DamagedCapture, match="do not match their checksum")
        with residuum.Client(store=running[1].target) as reader, damaged:
            reader.activations("a", layers=[7, 8], wait=False, allow_partial=True)
        with failing_with(Reason.ERROR_REASON_CHECKSUM_MISMATCH):  # a part of a layer has a checksum of its own
            peer.read(layers=[8], positions=span(0, 19))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"layers": range(65)}, "at most 8388608 bytes"),
            ({"layers": range(2), "width": 16384 + 256}, "with one layer, a chunk has at most 2097152 bytes"),
            ({"layer_crc32c": [1]}, "1 checksums of layers, but 44 layers"),
        ],
    )
    def test_those_that_no_reader_could_get_are_rejected(self, running, write, fields, message):
        assert write(**fields) == {1: Reason.ERROR_REASON_INVALID_FIELD}
