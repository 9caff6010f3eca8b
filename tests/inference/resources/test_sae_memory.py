"""The service's side of encoders: uploads, the memory that they take, and requests that need them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import threading
from dataclasses import replace

import grpc
import grpc.aio
import numpy as np
import pytest

from inference_svc.resources import sae_upload
from inference_svc.resources.sae_memory import SAEMemory
from inference_svc.resources.vector_cache import vector_name
from inference_svc.taps.encodings.check import bytes_of
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, sae_pb2, selection_pb2
from residuum.wire.rows.encodings import RAW, SAE
from residuum.wire.sae import JUMP_RELU, TOP_K, EncoderShape
from tests.encoding_cases import B16, encoder
from tests.inference.service_support import FACTS, HIDDEN, FakeEngine, failure_of, running_service, until

FEATURES = 50
SIZE = 4 * FEATURES * (HIDDEN + 1)
"""Bytes of an encoder."""


def header_of(one, data=None):
    shape = one.shape
    header = sae_pb2.SAEHeader(
        features=shape.features, width=shape.width, dtype=shape.dtype, activation=shape.activation,
        active=shape.active, normalization=shape.normalization,
    )  # fmt: skip
    sha = EncoderShape.of(header).begin_digest()
    sha.update(bytes_of(one).tobytes() if data is None else data)
    header.digest = sha.digest()
    return header


def messages(one, header=None, data=None, pieces=3):
    """Yield the messages of an upload."""
    data = bytes_of(one).tobytes() if data is None else data
    yield inference_pb2.PutSAERequest(header=header or header_of(one, data))
    for part in np.array_split(np.frombuffer(data, np.uint8), pieces):
        yield inference_pb2.PutSAERequest(data=part.tobytes())


def numbered(seed, **options):
    return encoder(FEATURES, HIDDEN, seed=seed, **options)


def engine(sae_bytes=3 * SIZE):
    made = FakeEngine()
    made.facts = replace(FACTS, sae_bytes=sae_bytes, encodings=(RAW, SAE))
    return made


def capture(one, **options):
    features = sae_pb2.SAEFeatures(digest=header_of(one).digest, features=one.shape.features)
    return capture_pb2.CaptureSpec(
        layers=selection_pb2.LayerSelection(all=True), encoding=SAE,
        encoding_options=capture_pb2.EncodingOptions(sae=features, **options),
    )  # fmt: skip


def kept(service):
    """The encoders that the workers keep after the last call, by digest, and their bytes, if they were sent with it."""
    return {bytes.fromhex(name)[-32:]: data for name, (_, data) in service.engine.saes[-1].items()}


async def test_an_encoder_is_sent_once():
    one = numbered(1, activation=JUMP_RELU, dtype=B16)
    async with running_service(engine=engine()) as service:
        info = await service.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        assert info.limits.sae_bytes == 3 * SIZE
        answer = await service.stub.PutSAE(messages(one))
        assert (answer.existed, answer.num_bytes, answer.free_bytes) == (False, one.shape.nbytes, 3 * SIZE)
        assert kept(service) == {header_of(one).digest: bytes_of(one).tobytes()}
        calls = len(service.engine.saes)
        answer = await service.stub.PutSAE(iter([next(messages(one))]))
        assert answer.existed
        assert len(service.engine.saes) == calls


async def halting(encoder, event):
    """Yield the messages of an upload that goes on after the first one when an event is set."""
    parts = messages(encoder)
    yield next(parts)
    await event.wait()
    for part in parts:
        yield part


async def test_the_same_encoder_from_two_calls_at_once_is_loaded_once():
    one, started = numbered(1), asyncio.Event()
    async with running_service(engine=engine(SIZE)) as service:
        first = asyncio.ensure_future(service.stub.PutSAE(halting(one, started)))
        await until(lambda: service.parts.saes._arriving)
        second = asyncio.ensure_future(service.stub.PutSAE(iter([next(messages(one))])))
        await asyncio.sleep(0.05)
        assert not second.done()
        started.set()
        assert not (await first).existed
        assert (await second).existed
        assert len(service.engine.saes) == 1


async def test_an_upload_that_breaks_off_leaves_nothing():
    async def stuck():
        yield next(messages(numbered(1)))
        await asyncio.Event().wait()

    async with running_service(engine=engine(SIZE)) as service:
        call = service.stub.PutSAE(stuck())
        await until(lambda: service.parts.saes._arriving)
        failure = await failure_of(service.stub.PutSAE(messages(numbered(2))))
        assert (failure.reason_name, failure.metadata) == ("LIMIT_REACHED", {"limit": "sae_bytes"})
        assert f"takes {SIZE} bytes, and 0 of the server's {SIZE} bytes" in str(failure)
        call.cancel()
        await until(lambda: not service.parts.saes._arriving)
        assert not (await service.stub.PutSAE(messages(numbered(2)))).existed


async def test_encoders_that_no_request_needs_make_room():
    one, two, three, four = (numbered(seed) for seed in range(4))
    async with running_service("127.0.0.1:1", engine=engine()) as service:
        for item in (one, two, three):
            await service.stub.PutSAE(messages(item))
        spec = inference_pb2.RequestSpec(request_id="a", capture=capture(one))
        service.registry.register(service.parts.admission.resolve(spec), "", "a")
        answer = await service.stub.PutSAE(messages(four))
        assert answer.free_bytes == 2 * SIZE
        assert kept(service).keys() == {header_of(item).digest for item in (one, three, four)}
        big = encoder(3 * FEATURES, HIDDEN)
        failure = await failure_of(service.stub.PutSAE(messages(big)))
        assert f"takes {3 * SIZE} bytes, and {2 * SIZE} of the server's {3 * SIZE} bytes" in str(failure)
        service.registry.abort("a", "")
        assert not (await service.stub.PutSAE(messages(big))).existed
        assert kept(service).keys() == {header_of(big).digest}


def _bad_number():
    data = np.frombuffer(bytes_of(numbered(1)), np.float32).copy()
    data[-1] = np.nan
    return data.tobytes()


ONE = numbered(1)
BAD_UPLOADS = {
    "no header": (lambda: iter([inference_pb2.PutSAERequest(data=b"a")]), "INVALID_FIELD", "must be the header"),
    "nothing": (lambda: iter([]), "INVALID_FIELD", "must be the header"),
    "half a digest": (lambda: messages(ONE, sae_pb2.SAEHeader(digest=b"d")), "INVALID_FIELD", "has 1 bytes, not 32"),
    "another width": (lambda: messages(encoder(9, 5)), "WRONG_LENGTH", "takes rows of 5 elements, but .* have 4"),
    "another digest": (lambda: messages(ONE, header_of(numbered(2))), "DIGEST_MISMATCH", "do not have the digest"),
    "NaN": (lambda: messages(ONE, data=_bad_number()), "BAD_VALUES", "NaN or infinity"),
    "too few bytes": (lambda: messages(ONE, header_of(ONE), b"abc"), "INVALID_FIELD", f"only 3, fewer than the {SIZE}"),
    "too many bytes": (
        lambda: messages(ONE, header_of(ONE), bytes(SIZE + 8)), "INVALID_FIELD", f"more than the {SIZE}",
    ),
    "no bytes": (lambda: iter([next(messages(ONE))]), "MISSING_SAE", "is not on the server"),
    "no features": (
        lambda: messages(ONE, sae_pb2.SAEHeader(digest=bytes(32), width=4)), "INVALID_FIELD", "features is 0",
    ),
    "too many active": (
        lambda: messages(ONE, sae_pb2.SAEHeader(digest=bytes(32), width=4, features=3, activation=TOP_K, active=4)),
        "INVALID_FIELD", "active is 4",
    ),
    "an unknown activation": (
        lambda: messages(ONE, sae_pb2.SAEHeader(digest=bytes(32), width=4, features=3, activation=9)),
        "INVALID_FIELD", "activation 9 is unknown",
    ),
    # Not larger: the service reads on for 3 * SIZE bytes, and gRPC may lose the answer to a call that still sends then.
    "too large": (lambda: messages(encoder(4 * FEATURES, HIDDEN)), "LIMIT_REACHED", f"takes {4 * SIZE} bytes, and the"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_UPLOADS)
async def test_bad_uploads_are_refused_and_leave_nothing(name):
    make, reason, message = BAD_UPLOADS[name]
    async with running_service(engine=engine()) as service:
        failure = await failure_of(service.stub.PutSAE(make()))
        assert failure.reason_name == reason
        assert re.search(message, str(failure)), str(failure)
        assert service.parts.saes.free_bytes == 3 * SIZE
        assert not service.engine.saes


async def test_an_encoder_that_is_there_may_be_sent_whole_again():
    async with running_service(engine=engine()) as service:
        for existed in (False, True):
            assert (await service.stub.PutSAE(messages(ONE, pieces=20))).existed == existed


async def test_a_worker_that_cannot_load_is_reported():
    async with running_service(engine=engine()) as service:
        service.engine.sae_state = "OutOfMemoryError"
        failure = await failure_of(service.stub.PutSAE(messages(ONE)))
        assert (failure.reason_name, "OutOfMemoryError" in str(failure)) == ("INTERNAL", True)
        service.engine.sae_state = True
        assert not (await service.stub.PutSAE(messages(ONE))).existed


async def test_a_server_without_memory_for_encoders_refuses_them():
    async with running_service() as service:
        failure = await failure_of(service.stub.PutSAE(messages(ONE)))
        assert failure.reason_name == "INVALID_FIELD"
        assert "no memory for sparse autoencoders and lenses. Ask its operator to set --sae-mib" in str(failure)


async def test_requests_need_their_encoder(tmp_path):
    async with running_service("127.0.0.1:1", engine=engine()) as service:
        check = service.parts.saes.check
        spec = service.parts.admission.resolve(inference_pb2.RequestSpec(capture=capture(ONE)))
        assert spec.capture is not None
        for tenant in ("", "alice"):
            with pytest.raises(Exception, match=r"is not on the server\. Send its encoder with PutSAE") as caught:
                check(tenant, spec.capture, [HIDDEN])
            assert caught.value.metadata == {"digest": header_of(ONE).digest.hex()}
            assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
            await service.stub.PutSAE(messages(ONE))  # of the default tenant
        check("", spec.capture, [HIDDEN])
        with pytest.raises(Exception, match="takes rows of 4 elements, but the rows that it is for have 8"):
            check("", spec.capture, [HIDDEN, 8])
        spec.capture.encoding_options.sae.features += 1
        with pytest.raises(Exception, match="is 51, but the encoder has 50 features"):
            check("", spec.capture, [HIDDEN])


async def test_a_header_alone_drops_no_encoder():
    """Others' encoders are dropped only for bytes that have arrived and match their digest."""
    async with running_service(engine=engine()) as service:
        for seed in (1, 2, 3):
            await service.stub.PutSAE(messages(numbered(seed)))
        before = set(service.parts.saes._kept)
        for data in (None, b"abc", bytes(SIZE)):
            parts = list(messages(numbered(4), header_of(numbered(4)), data))
            await failure_of(service.stub.PutSAE(iter(parts[: 1 if data is None else None])))
            assert set(service.parts.saes._kept) == before
        assert not (await service.stub.PutSAE(messages(numbered(4)))).existed
        assert kept(service).keys() == {header_of(numbered(seed)).digest for seed in (2, 3, 4)}


async def test_the_file_of_an_upload_is_closed_after_the_last_write(monkeypatch):
    """The caller leaves while a thread writes."""
    begun, goes_on, states = threading.Event(), threading.Event(), []
    spool = sae_upload.spool

    class File:
        def __init__(self):
            self.file = spool()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            states.append("closed")
            self.file.close()

        def write(self, data):
            begun.set()
            assert goes_on.wait(10)
            states.append("written")
            return self.file.write(data)

    monkeypatch.setattr(sae_upload, "spool", File)
    async with running_service(engine=engine(SIZE)) as service:
        call = service.stub.PutSAE(messages(numbered(1)))
        assert await asyncio.to_thread(begun.wait, 10)
        call.cancel()
        await asyncio.sleep(0.2)
        assert not states
        goes_on.set()
        await until(lambda: "closed" in states)
        assert states == ["written", "closed"]
        assert service.parts.saes.free_bytes == SIZE


async def in_tiny_messages(one):
    """Each message arrives in time, but all together would take for ever."""
    yield inference_pb2.PutSAERequest(header=header_of(one))
    while True:
        yield inference_pb2.PutSAERequest(data=b"x")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("limit", "value", "seconds"), [("SLOWEST_BYTES_PER_SECOND", SIZE / 0.2, 1.2), ("LONGEST_SECONDS", 0.5, 0.5)]
)
async def test_an_upload_in_tiny_messages_is_ended_and_its_room_is_free(monkeypatch, limit, value, seconds):
    monkeypatch.setattr(sae_upload, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(sae_upload, limit, value)
    async with running_service(engine=engine(SIZE)) as service:
        # Not through gRPC, which may lose the answer to a call that still sends.
        with pytest.raises(Failure, match=f"did not end within {seconds} s") as caught:
            await asyncio.wait_for(service.parts.saes.put(in_tiny_messages(numbered(1)), ""), 60)
        assert caught.value.reason_name == "CALLER_STALLED"
        assert service.parts.saes.free_bytes == SIZE
        monkeypatch.undo()
        assert not (await service.stub.PutSAE(messages(numbered(2)))).existed


async def test_what_an_answered_call_still_sends_is_read_for_a_short_time_only(monkeypatch):
    monkeypatch.setattr(sae_upload, "IDLE_SECONDS", 0.3)
    await asyncio.wait_for(sae_upload.drain(in_tiny_messages(numbered(1)), 1 << 40), 60)


@pytest.mark.parametrize("known", [True, False], ids=["known", "refused"])
async def test_an_upload_reads_what_its_caller_still_sends_after_the_answer(known):
    """Otherwise gRPC may lose the answer."""
    one, left = numbered(1), []

    async def sent():
        for message in messages(one if known else encoder(FEATURES, HIDDEN + 1)):
            yield message
        left.append("nothing")

    async with running_service(engine=engine()) as service:
        await service.stub.PutSAE(messages(one))
        put = service.parts.saes.put(sent(), "")
        if known:
            assert (await put).existed
        else:
            with pytest.raises(Failure, match="rows of 5 elements"):
                await put
    assert left == ["nothing"]


async def test_what_an_answered_call_still_sends_is_read_up_to_a_size_only():
    sent = in_tiny_messages(numbered(1))
    await asyncio.wait_for(sae_upload.drain(sent, 3), 20)
    assert await anext(sent)


@pytest.mark.parametrize("num_sent", [1, 2], ids=["after the header", "after some bytes"])
async def test_an_upload_that_stalls_is_ended_and_its_room_is_free(monkeypatch, num_sent):
    monkeypatch.setattr(sae_upload, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(sae_upload, "SLOWEST_BYTES_PER_SECOND", SIZE / 60)  # the limit for the whole upload is far away
    left = asyncio.Event()

    async def stalled():
        parts = messages(numbered(1))
        for _ in range(num_sent):
            yield next(parts)
        await left.wait()

    async with running_service(engine=engine(SIZE)) as service:
        failure = await failure_of(service.stub.PutSAE(stalled()))
        assert failure.reason_name == "CALLER_STALLED"
        assert "did not arrive within 0.3 s" in str(failure)
        assert service.parts.saes.free_bytes == SIZE
        monkeypatch.undo()
        assert not (await service.stub.PutSAE(messages(numbered(2)))).existed
        left.set()


async def test_a_call_that_waits_for_an_upload_that_fails_sends_its_own():
    one, started = numbered(1), asyncio.Event()

    async def broken():
        yield next(messages(one))
        await started.wait()
        yield inference_pb2.PutSAERequest(data=b"abc")

    async with running_service(engine=engine(SIZE)) as service:
        first = asyncio.ensure_future(failure_of(service.stub.PutSAE(broken())))
        await until(lambda: service.parts.saes._arriving)
        second = asyncio.ensure_future(service.stub.PutSAE(messages(one)))
        await asyncio.sleep(0.05)
        started.set()
        assert "only 3, fewer" in str(await first)
        assert not (await second).existed


async def test_an_encoder_that_is_dropped_before_a_waiting_call_goes_on_is_received_again():
    one, started = numbered(1), asyncio.Event()
    async with running_service(engine=engine(SIZE)) as service:
        saes = service.parts.saes
        first = asyncio.ensure_future(service.stub.PutSAE(halting(one, started)))
        await until(lambda: saes._arriving)
        second = asyncio.ensure_future(service.stub.PutSAE(messages(one)))
        await asyncio.sleep(0.05)
        (arriving,) = saes._arriving.values()
        arriving.ended.set = lambda plain=arriving.ended.set: (saes._kept.clear(), plain())  # as another upload does
        started.set()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await first
        assert not (await second).existed


async def test_uploads_leave_no_file_with_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    async def watched():
        for part in messages(numbered(1)):
            yield part
            seen.append(list(tmp_path.iterdir()))

    async with running_service(engine=engine()) as service:
        await service.stub.PutSAE(watched())
    assert seen
    assert not any(seen)


async def test_a_folder_for_files_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    async with running_service(engine=engine()) as service:
        failure = await failure_of(service.stub.PutSAE(messages(ONE)))
        assert (failure.reason_name, failure.metadata) == ("LIMIT_REACHED", {"limit": "temporary_files"})
        assert f"cannot write the encoder to a file in {tmp_path / 'none'}: No such file" in str(failure)
        assert service.parts.saes.free_bytes == 3 * SIZE


async def test_a_worker_without_a_large_enough_piece_gets_room():
    """Encoders lie in one piece of memory each: the service drops idle ones until there is one."""
    async with running_service(engine=engine()) as service:
        for seed in (1, 2):
            await service.stub.PutSAE(messages(numbered(seed)))
        plain, calls, attempts = service.engine.keep_saes, [], set()

        async def crowded(wanted):
            calls.append(len(wanted))
            attempts.update(attempt for *_, path, attempt in wanted if path)
            return [True if path == "" or len(wanted) == 1 else "MemoryError" for *_, path, _ in wanted]

        service.engine.keep_saes = service.parts.saes._keep = crowded
        assert not (await service.stub.PutSAE(messages(numbered(3)))).existed
        assert calls == [3, 2, 1]
        assert len(attempts) == 3, "workers report the error of an attempt until there is another one"
        service.parts.saes._is_leased = lambda name: True
        failure = await failure_of(service.stub.PutSAE(messages(numbered(4))))
        assert (failure.reason_name, "not in one piece" in str(failure)) == ("LIMIT_REACHED", True)
        service.parts.saes._keep = plain


class TestTenants:
    """Limits of one tenant's encoders, on the memory itself."""

    def memory(self, num=3):
        async def keep(wanted):
            return [True] * len(wanted)

        self.leased = set()
        return SAEMemory(num * SIZE, [HIDDEN], self.leased.__contains__, keep)

    async def put(self, memory, seed, tenant, num_allowed=2):
        async def sent():
            for message in messages(numbered(seed)):
                yield message

        return await memory.put(sent(), tenant, num_allowed * SIZE)

    def names(self, memory, tenant):
        return {name[-32:] for name in memory._kept if name.startswith(b"%s/" % tenant.encode())}

    async def test_a_tenant_pushes_its_own_encoders_out_first(self):
        memory = self.memory()
        await self.put(memory, 9, "bob")
        for seed in (1, 2, 3):
            answer = await self.put(memory, seed, "alice")
            assert answer.free_bytes == 2 * SIZE
        assert self.names(memory, "bob") == {header_of(numbered(9)).digest}
        assert self.names(memory, "alice") == {header_of(numbered(seed)).digest for seed in (2, 3)}

    async def test_a_tenant_whose_requests_need_its_share_gets_no_more(self):
        memory = self.memory()
        for seed in (1, 2):
            await self.put(memory, seed, "alice")
            self.leased.add(vector_name("alice", header_of(numbered(seed)).digest))
        with pytest.raises(Failure) as raised:
            await self.put(memory, 3, "alice")
        assert raised.value.reason == Reason.ERROR_REASON_QUOTA_EXCEEDED
        assert raised.value.metadata == {"limit": "max_sae_bytes", "allowed": str(2 * SIZE)}
        await self.put(memory, 3, "bob")

    async def test_uploads_count_against_the_share_of_their_tenant(self):
        memory = self.memory()
        waiting = asyncio.Event()

        async def stuck(seed):
            yield next(messages(numbered(seed)))
            await waiting.wait()

        calls = [asyncio.ensure_future(memory.put(stuck(seed), "alice", 2 * SIZE)) for seed in (1, 2)]
        await until(lambda: len(memory._arriving) == 2)
        with pytest.raises(Failure, match="may take 2000 bytes"):
            await self.put(memory, 3, "alice")
        assert (await self.put(memory, 3, "bob")).free_bytes == SIZE
        waiting.set()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, Failure)
        assert memory.free_bytes == 3 * SIZE
