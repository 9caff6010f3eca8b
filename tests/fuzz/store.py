"""The store under hostile calls: a real store with gRPC and LMDB, with captures that must not change."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import struct
import tempfile
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from residuum.rpc.shared_memory import GivenMemory, create_memory, give_memory
from residuum.v1 import capture_pb2, errors_pb2, selection_pb2, store_pb2
from residuum.wire.rows.frames import append_prefix, placed_append
from residuum.wire.rows.shared_memory import MIN_READ_BYTES, READ, SEAL_FUTURE_WRITE, WRITE
from store_svc.server import Store
from store_svc.settings import StoreSettings
from tests.fuzz.calls import SECONDS, Answer, Caller, Running, methods
from tests.fuzz.messages import Choices, Words, change_bytes, made, some
from tests.store.support import (
    COMPLETE,
    OPEN,
    POST,
    PRE,
    Client,
    call_errors,
    describe,
    grid,
    loss_message,
    make_chunk,
    seal_request,
)

SERVICE = store_pb2.DESCRIPTOR.services_by_name["StoreService"]
_MOST_CALLS = 16
_NAMES = ["a", "b", "c"]
_PLACED = capture_pb2.Chunk.FromString(make_chunk([0, 1, 5], [2, 3]))


class FuzzedStore(contextlib.AbstractContextManager):
    """A store with a hostile and a good client."""

    def __init__(self, **settings: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-store-")
        values = {"max_bytes": "256MiB", "ending_timeout_seconds": 0.2, "grace_seconds": 0, **settings}
        path = Path(self._folder.name, "db")
        self._store = Store(StoreSettings(listen="127.0.0.1:0", path=path, **values), on_death=lambda: None)
        self.client = Client(self._store.port)
        self.caller = Caller(self.client.channel, SERVICE)
        self._memories = [self._give(READ), self._give(WRITE)]
        keys = [memory.key for memory in self._memories]
        self._words = Words([*_NAMES, ""], [b"", bytes(32), *keys])
        self._waiting: list[tuple[Running, list[bytes]]] = []
        self._kept = {self._keep(sealed=True): COMPLETE, self._keep(sealed=False): OPEN}
        self._manifests = {name: self.client.get(name) for name in self._kept}

    def __exit__(self, *_: object) -> None:
        for memory in self._memories:
            memory.close()
        self.client.close()
        self._store.stop()
        self._folder.cleanup()

    def run(self, data: bytes) -> None:
        """Make the calls that are derived from some bytes."""
        choices = Choices(data)
        for seed in _seeds("OpenCapture"):
            if choices.one_in(2):
                self.caller.call("OpenCapture", [seed.SerializeToString()])
        for _ in range(choices.randrange(1, _MOST_CALLS)):
            self._begin(choices, choices.choice(methods(SERVICE)))
        self._end_waiting(choices)

    def call(self, choices: Choices, method: str) -> None:
        """Make a hostile call of a method."""
        self._begin(choices, method)
        self._end_waiting(choices)

    def _begin(self, choices: Choices, method: str) -> None:
        """Make a hostile call. If it may wait for a capture, only begin it: it lasts while others are made."""
        if method == "AppendChunks":
            messages = _appends(choices, self._words, self._memories[1].key)
        else:
            messages = [made(choices, choices.choice(_seeds(method)), self._words)]
        captures = _waited_for(method, messages[0]) if messages else []
        if captures:
            self._waiting.append((self.caller.begin(method, messages), captures))
        else:
            self._learn(self.caller.call(method, messages))

    def _end_waiting(self, choices: Choices) -> None:
        """End the calls that may wait for captures: their caller leaves, or the captures are deleted."""
        calls, self._waiting = self._waiting, []
        for call, captures in calls:
            if choices.one_in(2):
                call.cancel()
            else:
                for capture in captures:
                    self.caller.call("DeleteCapture", [capture])
        for call, _ in calls:
            self._learn(call.answer())

    def check(self) -> None:
        """Check that the store is alive, serves, and has neither lost nor changed rows of other clients."""
        assert not self._store.died
        calls = self._store._servicer.calls
        calls.wait_until_idle(SECONDS)
        assert not calls.num_reading + calls.num_writing, "a call still runs after its caller has left"
        faults = [labels for labels in call_errors(self._store) if labels["reason"] == "INTERNAL"]
        assert not faults, faults  # also of calls whose caller has left
        for name, state in self._kept.items():
            cells, manifest = self.client.read(name)
            assert manifest == self._manifests[name]
            assert manifest.state == state
            assert cells == grid([0, 1], range(3))
        self.client.stub.DeleteCapture(store_pb2.DeleteCaptureRequest(capture_id=self._keep(sealed=True)))

    def _give(self, kind: int) -> GivenMemory:
        """Give a memory with a chunk at its start, so that calls may name it."""
        answer = self.client.stub.DescribeStore(store_pb2.DescribeStoreRequest())
        descriptor = create_memory(MIN_READ_BYTES)
        os.pwrite(descriptor, _PLACED.payload, 0)
        if kind == WRITE:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
        try:
            return give_memory(answer.shared_memory_socket, answer.instance, kind, descriptor)
        finally:
            os.close(descriptor)

    def _keep(self, *, sealed: bool) -> str:
        """Write a capture that hostile calls cannot name."""
        name = f"kept-{secrets.token_hex(8)}"
        self.client.open(describe(name, layers=[0, 1], prompt=2))
        self.client.append([make_chunk([0, 1], range(2)), make_chunk([0, 1], [2])], name)
        if sealed:
            assert self.client.seal(name, generated=[2]).state == COMPLETE
        return name

    def _learn(self, answer: Answer) -> None:
        for response in answer.responses:
            if isinstance(response, store_pb2.ListCapturesResponse) and response.next_page_token:
                self._words.texts[len(_NAMES) :] = [response.next_page_token]
            if isinstance(response, store_pb2.AppendChunksResponse):
                faults = [item for item in response.rejections if item.error.reason == errors_pb2.ERROR_REASON_INTERNAL]
                assert not faults, faults
                assert all(len(item.error.message) < 4096 for item in response.rejections)
            if isinstance(response, store_pb2.DeleteCapturesResponse):
                reasons = {item.error.reason for item in response.results}
                assert reasons <= {0, errors_pb2.ERROR_REASON_UNKNOWN_CAPTURE}, reasons


def _waited_for(method: str, message: bytes) -> list[bytes]:
    """Return deletions of the captures that a request may wait for; none if its call ends without them."""
    kind = {
        "GetCapture": store_pb2.GetCaptureRequest,
        "ReadChunks": store_pb2.ReadChunksRequest,
        "ReadCaptures": store_pb2.ReadCapturesRequest,
    }.get(method)
    try:
        request = kind.FromString(message) if kind else None
    except DecodeError:
        return []
    if request is None or not (request.HasField("wait") if method == "GetCapture" else request.follow):
        return []
    tenant = request.tenant if request.HasField("tenant") else None
    names = dict.fromkeys(request.capture_ids if method == "ReadCaptures" else [request.capture_id])
    return [store_pb2.DeleteCaptureRequest(capture_id=name, tenant=tenant).SerializeToString() for name in names]


@functools.cache
def _seeds(method: str) -> list[Message]:
    """Return valid requests of a method."""
    description = describe("a", layers=[0, 1, 5], sites=[POST, PRE], prompt=3, sequences=2)
    other = describe("b", layers=[0], prompt=2)
    other.spec.positions.ranges.add(first=-2, last=-1)
    positions = selection_pb2.PositionSelection(
        ranges=[selection_pb2.PositionRange(first=0, last=2**31 - 1)], phases=[selection_pb2.PHASE_PROMPT], every=2
    )
    vector = struct.pack("<4f", 1, -1, 0.5, 2)
    opens = [
        store_pb2.OpenCaptureRequest(description=item, if_exists=if_exists)
        for item, if_exists in ((description, 0), (other, 0), (other, capture_pb2.IF_EXISTS_SKIP))
    ]
    seals = [
        seal_request("a", [2, 0]),
        seal_request("b", [2], capture_pb2.CAPTURE_STATE_ABORTED),
        seal_request(
            "b",
            [1],
            capture_pb2.CAPTURE_STATE_INCOMPLETE,
            incomplete_reason=capture_pb2.INCOMPLETE_REASON_REQUEST_FAILED,
            incomplete_detail="out of memory",
        ),
    ]
    return {
        "OpenCapture": opens,
        "OpenCaptures": [
            store_pb2.OpenCapturesRequest(opens=opens),
            store_pb2.OpenCapturesRequest(opens=[store_pb2.OpenCaptureRequest(description=other, check_only=True)]),
        ],
        "RenewLease": [store_pb2.RenewLeaseRequest(service_instance="s")],
        "SealCapture": seals,
        "SealCaptures": [store_pb2.SealCapturesRequest(seals=items) for items in (seals, seals[:1] * 2)],
        "GetCapture": [
            store_pb2.GetCaptureRequest(capture_id="a"),
            store_pb2.GetCaptureRequest(capture_id="b", wait=Duration(seconds=1)),
        ],
        "ListCaptures": [
            store_pb2.ListCapturesRequest(page_size=1),
            store_pb2.ListCapturesRequest(where="split = x and y < 2.5"),
            store_pb2.ListCapturesRequest(page_size=1000, prefix="a", states=[OPEN, COMPLETE], page_token="AAAA"),
        ],
        "ReadChunks": [
            store_pb2.ReadChunksRequest(capture_id="a"),
            store_pb2.ReadChunksRequest(capture_id="a", layers=[0], sites=[POST], sequences=[0], positions=positions),
            store_pb2.ReadChunksRequest(capture_id="b", follow=True),
        ],
        "ReadCaptures": [
            store_pb2.ReadCapturesRequest(capture_ids=["b", "a"], layers=[0], positions=positions),
            store_pb2.ReadCapturesRequest(capture_ids=["a", "none", "b"], sites=[POST], sequences=[1], follow=True),
        ],
        "Search": [
            store_pb2.SearchRequest(vector=vector, layer=0, max_hits=10, site=POST, context_tokens=2),
            store_pb2.SearchRequest(
                vector=vector,
                layer=5,
                max_hits=1,
                measure=store_pb2.SEARCH_MEASURE_COSINE,
                prefix="a",
                order=store_pb2.SEARCH_ORDER_LEAST,
                states=[COMPLETE],
                where="split = x",
                positions=positions,
                max_hits_per_capture=1,
            ),
            store_pb2.SearchRequest(vector=vector, layer=1, max_hits=10_000, capture_ids=["a", "none"]),
        ],
        "LabelCapture": [
            store_pb2.LabelCaptureRequest(
                capture_id="a",
                labels=[capture_pb2.Label(name="split", text="x"), capture_pb2.Label(name="y", integer=-1)],
            ),
            store_pb2.LabelCaptureRequest(capture_id="b", removed_names=["split"]),
        ],
        "DeleteCapture": [store_pb2.DeleteCaptureRequest(capture_id=name) for name in ("a", "b")],
        "DeleteCaptures": [
            store_pb2.DeleteCapturesRequest(capture_ids=names) for names in (["a", "none", "b"], ["b", "b"])
        ],
        "GetStats": [store_pb2.GetStatsRequest()],
        "DescribeStore": [store_pb2.DescribeStoreRequest()],
    }[method]


def _appends(choices: Choices, words: Words, key: bytes) -> list[bytes]:
    """Return the messages of a writer's stream: chunks and losses, some of them damaged, some out of order."""
    chunks = [
        make_chunk([0, 1, 5], [0, 1]),
        make_chunk([0], [0, 1, 2], site=PRE, sequence=1),
        make_chunk([5], [4_000_000_000], sequence=1),
        make_chunk([0, 1], range(4)),
    ]
    messages = []
    for number in range(1, choices.randrange(2, 12)):
        kind = choices.randrange(5)
        name = choices.choice(_NAMES)
        if kind == 0:
            loss = store_pb2.RowLoss(
                sites=[POST], layers=[0], positions=[0, 1], reason=capture_pb2.INCOMPLETE_REASON_OVERFLOW
            )
            seed = store_pb2.AppendChunksRequest.FromString(loss_message(number, name, loss))
            messages.append(made(choices, seed, words))
            continue
        if kind == 4:
            placed = store_pb2.PlacedChunk(header=_PLACED.header, crc32c=_PLACED.crc32c, num_bytes=len(_PLACED.payload))
            seed = store_pb2.AppendChunksRequest.FromString(placed_append(number, name, placed, key))
            messages.append(made(choices, seed, words))
            continue
        chunk = choices.choice(chunks)
        if kind == 1:
            chunk = made(choices, capture_pb2.Chunk.FromString(chunk), words)
        odd = choices.choice((0, number - 1, 2**64 - 1))
        data = append_prefix(odd if choices.one_in(16) else number, name, len(chunk)) + chunk
        messages.append(change_bytes(choices, data) if kind == 2 and choices.one_in(4) else data)
    return some(choices, messages) if choices.one_in(8) else messages
