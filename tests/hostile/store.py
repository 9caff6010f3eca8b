"""Attacks on a store. Each returns a short description of its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio

from residuum.rpc.channels import open_aio_channel, open_channel
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from residuum.wire.limits import MAX_CAPTURES_PER_DELETION, MAX_CAPTURES_PER_OPEN
from tests.hostile.http2 import Peer, huge_headers, ping_flood, rapid_reset
from tests.store.support import Client, OpenStream, describe, grid, make_chunk, message, seal_request

MIB = 1 << 20
APPEND, STATS = "/residuum.v1.StoreService/AppendChunks", "/residuum.v1.StoreService/GetStats"
WIDE = 1 << 18
"""float32 elements of a row of 1 MiB."""


class WellBehaved:
    """A follower and a writer that start before the attacks and must work after them."""

    def __init__(self, port: int) -> None:
        self.client = Client(port)
        self.client.open(describe("good", prompt=1000))
        self._writer = OpenStream(self.client, seconds=600)
        self._position = 0
        self._follower = self.client.stub.ReadChunks(store_pb2.ReadChunksRequest(capture_id="good", follow=True))
        assert next(self._follower).HasField("manifest")
        self.check()

    def check(self) -> None:
        """Write a row, and check that the follower gets it."""
        self._writer.until_acked(self._writer.send(make_chunk([0, 1, 2], [self._position]), "good"))
        assert list(next(self._follower).chunk.header.positions) == [self._position]
        self._position += 1

    def end(self) -> None:
        self.check()
        assert self.client.read("good")[0] == grid([0, 1, 2], range(self._position))
        self._follower.cancel()
        self._writer.half_close()
        self.client.close()


def wide_capture(client: Client, name: str, rows: int) -> None:
    client.open(describe(name, width=WIDE, layers=[0], prompt=rows))
    client.append((make_chunk([0], [position], width=WIDE) for position in range(rows)), name)


def idle_streams(port: int, count: int) -> str:
    """Many followers of a capture that gets no rows."""
    return asyncio.run(_idle(port, count))


async def _idle(port: int, count: int) -> str:
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_aio_channel(f"127.0.0.1:{port}")) for _ in range(10)]
        stubs = [store_pb2_grpc.StoreServiceStub(channel) for channel in channels]
        request = store_pb2.ReadChunksRequest(capture_id="good", follow=True)
        calls = [stubs[at % len(stubs)].ReadChunks(request) for at in range(count)]
        answers = await asyncio.gather(*(call.read() for call in calls))
        assert all(answer.HasField("manifest") for answer in answers)
        for call in calls:
            call.cancel()
    return f"{count} followers were served at once"


def busy_streams(port: int, count: int) -> str:
    """Half of the streams write a capture each, and the other half follow it."""
    chunks, positions = 8, 32

    def write(at: int) -> None:
        client = Client(port)
        client.append((make_chunk([0], range(n * positions, (n + 1) * positions)) for n in range(chunks)), f"busy{at}")
        client.seal(f"busy{at}", generated=[1])
        client.close()

    def follow(at: int) -> set:
        client = Client(port)
        cells, manifest = client.read(f"busy{at}", follow=True)
        client.close()
        assert manifest.num_rows == chunks * positions
        return cells

    opener = Client(port)
    for at in range(count // 2):
        opener.open(describe(f"busy{at}", layers=[0], prompt=chunks * positions))
    with ThreadPoolExecutor(count) as pool:
        readers = [pool.submit(follow, at) for at in range(count // 2)]
        for writer in [pool.submit(write, at) for at in range(count // 2)]:
            writer.result(120)
        for reader in readers:
            assert reader.result(120) == grid([0], range(chunks * positions))
    for at in range(count // 2):
        opener.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=f"busy{at}"))
    opener.close()
    return f"{count} streams wrote and read {count // 2 * chunks * positions} rows"


def slow_writers(port: int, count: int, patience: float) -> str:
    """Each call sends nearly all of a message of 4 MiB, then a byte from time to time."""
    peers = [Peer(port) for _ in range(count)]
    streams = [peer.call(APPEND) for peer in peers]
    both = list(zip(peers, streams, strict=True))
    sent = sum(peer.begin_message(stream, 4 * MIB - 1, 4 * MIB - 100) for peer, stream in both)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        for peer, stream in both:
            with contextlib.suppress(OSError):
                peer.connection.send_data(stream, b"x")
                peer.flush()
        time.sleep(min(1.0, patience / 2))
    for peer in peers:
        peer.close()
    return f"{count} writers left {sent // MIB} MiB unfinished"


def silent_connections(port: int, count: int) -> str:
    """Silent connections, connections with only the HTTP/2 preface, calls without a message, streams left open."""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    peers = [Peer(port) for _ in range(count // 2)]
    for at, peer in enumerate(peers):
        peer.call(APPEND if at % 2 else STATS)
    for item in [*sockets, *peers]:
        item.close()
    return f"{count} silent sockets and {len(peers)} silent calls vanished"


def readers_that_do_not_read(port: int, count: int) -> str:
    """Readers of a large capture that read one message and then stop."""
    channels = [open_channel(f"127.0.0.1:{port}") for _ in range(count)]
    calls, refused = [], 0
    for channel in channels:
        request = store_pb2.ReadChunksRequest(capture_id="wide")
        calls.append(store_pb2_grpc.StoreServiceStub(channel).ReadChunks(request, timeout=60))
        try:
            next(calls[-1])
        except grpc.RpcError as error:
            _expect(error, grpc.StatusCode.RESOURCE_EXHAUSTED)
            refused += 1
    for channel in channels:
        channel.close()
    return f"{count} readers, {refused} of them refused"


def searches(port: int, count: int) -> str:
    """Searches with the most hits of the widest rows; half of the callers vanish at once."""
    channels = [open_channel(f"127.0.0.1:{port}") for _ in range(count)]
    calls, refused = [], 0
    for channel in channels:
        request = store_pb2.SearchRequest(vector=b"\0\0\x80\x3f" * WIDE, layer=0, max_hits=10_000, context_tokens=64)
        calls.append(store_pb2_grpc.StoreServiceStub(channel).Search(request, timeout=60))
    for at, call in enumerate(calls):
        if at % 2:
            call.cancel()
            continue
        try:
            assert list(call)[-1].is_last
        except grpc.RpcError as error:
            _expect(error, grpc.StatusCode.RESOURCE_EXHAUSTED)
            refused += 1
    for channel in channels:
        channel.close()
    return f"{count} searches, {refused} of them refused"


def bombs(port: int, count: int) -> str:
    """Compressed messages of 256 MiB."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options, grpc.Compression.Gzip) as channel:
        call = channel.unary_unary(STATS)
        for _ in range(count):
            try:
                call(bytes(256 * MIB), timeout=60)
            except grpc.RpcError as error:
                _expect(error, grpc.StatusCode.UNIMPLEMENTED)
    return f"{count} compressed messages of 256 MiB were refused"


def open_flood(port: int, count: int) -> str:
    """Captures with the longest prompts, which never end."""
    client = Client(port)
    opened = 0
    try:
        for opened in range(count):
            client.open(describe(f"flood{opened}", prompt=131_072))
    except grpc.RpcError as error:
        _expect(error, grpc.StatusCode.RESOURCE_EXHAUSTED)
    # The store's answer repeats the odd names.
    names = [*(f"flood{at}" for at in range(opened)), *["\U000e0001" * 250] * MAX_CAPTURES_PER_DELETION]
    for first in range(0, len(names), MAX_CAPTURES_PER_DELETION):
        part = names[first : first + MAX_CAPTURES_PER_DELETION]
        client.stub.DeleteCaptures(store_pb2.DeleteCapturesRequest(capture_ids=part), timeout=60)
    client.close()
    return f"{opened} captures of the longest prompt were opened"


def batch_flood(port: int, count: int) -> str:
    """The largest calls that open and seal many captures, and try to skip existing ones."""
    description = describe("x", prompt=12_000)
    number = min(MAX_CAPTURES_PER_OPEN, (4 * MIB - 65_536) // (description.ByteSize() + 64))

    def flood(at: int) -> int:
        client = Client(port)
        opens, seals, names = [], [], [f"batch{at}-{item}" for item in range(number)]
        for item, name in enumerate(names):
            description = describe(name, prompt=12_000)
            if_exists = capture_pb2.IF_EXISTS_SKIP if item % 4 == 3 else capture_pb2.IF_EXISTS_REPLACE
            opens.append(store_pb2.OpenCaptureRequest(description=description, if_exists=if_exists))
            seals.append(seal_request(name, [3000]))
        request = store_pb2.OpenCapturesRequest(opens=opens)
        results = [item for answer in client.stub.OpenCaptures(request, timeout=60) for item in answer.results]
        answer = client.stub.SealCaptures(store_pb2.SealCapturesRequest(seals=seals), timeout=60)
        assert len(results) == len(answer.results) == number
        client.stub.DeleteCaptures(store_pb2.DeleteCapturesRequest(capture_ids=names), timeout=60)
        client.close()
        return sum(result.HasField("opened") for result in results)

    with ThreadPoolExecutor(16) as pool:
        opened = sum(pool.map(flood, range(count)))
    return f"{count} calls opened {opened} of {count * number} captures, and sealed them"


def append_flood(port: int, count: int) -> str:
    """The largest messages for unknown captures, sent faster than the store reads."""

    def flood(_: int) -> None:
        client = Client(port)
        chunk = make_chunk([0], [0], width=WIDE)
        with contextlib.suppress(grpc.RpcError):
            client.send(message(number, "nobody", chunk) for number in range(1, 9))
        client.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(flood, range(count)))
    return f"{count} streams sent {count * 8} MiB for unknown captures"


def _expect(error: grpc.RpcError, code: grpc.StatusCode) -> None:
    assert error.code() is code, error


Attack = Callable[[int], str]
ATTACKS: dict[str, Attack] = {
    "200 busy streams": lambda port: busy_streams(port, 200),
    "slow writers": lambda port: slow_writers(port, 64, 11.0),
    "silent connections": lambda port: silent_connections(port, 400),
    "readers that do not read": lambda port: readers_that_do_not_read(port, 160),
    "searches": lambda port: searches(port, 64),
    "append flood": lambda port: append_flood(port, 64),
    "batch flood": lambda port: batch_flood(port, 48),
    "open flood": lambda port: open_flood(port, 2000),
    "zip bombs": lambda port: bombs(port, 3),
    "rapid reset": lambda port: f"{rapid_reset(port, 5000)} streams were opened and reset",
    "ping flood": lambda port: f"{ping_flood(port, 5000)} pings before the server disconnected",
    "huge headers": lambda port: f"{huge_headers(port, 64 << 10)} calls with headers of 64 KiB were sent whole",
}
"""The attacks by name. Each takes the port."""
