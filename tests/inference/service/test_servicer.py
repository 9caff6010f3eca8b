"""The calls of InferenceService other than Generate, over real gRPC, and calls that never reach a handler."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from residuum.rpc.channels import open_aio_channel
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, errors_pb2, inference_pb2, steering_pb2
from residuum.v1.store_pb2_grpc import add_StoreServiceServicer_to_server
from residuum.wire.limits import DIGEST_BYTES, MAX_DIGESTS_PER_CALL, MAX_MESSAGE_BYTES, MAX_VECTORS_PER_CALL
from svc_common.rpc.serving import add_health_and_reflection
from svc_common.rpc.stall_timeouts import MAX_WATCHES
from tests import ports
from tests.inference.service_support import (
    ADD_JOY,
    CAPTURE,
    DEADLINE,
    FACTS,
    JOY,
    FakeStore,
    ask,
    failure_of,
    listening,
    running_service,
    spec,
    vector,
)

METHOD = "/residuum.v1.InferenceService/"
NOWHERE = "127.0.0.1:1"
"""An endpoint where no server listens."""


async def model_info(service):
    return await service.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())


async def check_store(service):
    return await service.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(check_store=True))


async def test_model_info_has_the_time_and_checks_the_store_only_on_request(service, store):
    info = await model_info(service)
    assert abs(info.server_time.ToNanoseconds() / 1e9 - time.time()) < DEADLINE
    assert not info.HasField("store_check")
    assert store.checks == 0
    check = (await check_store(service)).store_check
    assert (check.endpoint, check.HasField("error")) == (store.endpoint, False)
    assert store.checks == 1


async def test_model_info_says_why_the_store_does_not_answer(service_without_store):
    async with running_service(NOWHERE) as service:
        check = (await check_store(service)).store_check
    assert check.error.reason == errors_pb2.ERROR_REASON_STORE_UNREACHABLE
    assert NOWHERE in check.error.message
    assert not (await check_store(service_without_store)).HasField("store_check")


async def find_missing(service, *digests):
    response = await service.stub.FindMissingVectors(inference_pb2.FindMissingVectorsRequest(digests=digests))
    return list(response.missing_digests)


async def test_model_info_says_what_gates_measure(service):
    assert set((await model_info(service)).gate_measures) == set(steering_pb2.GateMeasure.values()) - {0}


async def test_model_info_has_the_facts_and_the_limits(store):
    async with running_service(store.endpoint, max_vectors=5, max_active_vectors=4, max_registrations=3) as service:
        info = await model_info(service)
    assert (info.model, info.num_layers, info.hidden_size, info.dtype) == ("tiny", 3, 4, FACTS.dtype)
    assert list(info.sites) == [capture_pb2.SITE_RESID_POST]
    assert list(info.steering_operations) == ["add", "ablate", "cap", "replace", "set", "multiply", "clamp_feature"]
    assert list(info.encodings) == [capture_pb2.ENCODING_RAW]
    assert list(info.reductions) == [capture_pb2.REDUCTION_NONE]
    assert info.default_encoding == capture_pb2.ENCODING_RAW
    assert list(info.store_endpoints) == ["store.example:1"]
    assert (info.vllm_version, info.eager) == ("1.2.3", True)
    assert info.server_version
    assert info.layout == capture_pb2.ParallelLayout(tensor_parallel_size=2, pipeline_parallel_size=1)
    assert info.limits == inference_pb2.Limits(
        max_model_len=64,
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_operations=256,
        max_vectors=5,
        max_active_vectors=4,
        max_running_requests=8,
        max_registrations=3,
        max_sequences=64,
        capture_pool_bytes=1000,
        ring_bytes=2000,
        table_bytes=500,
        max_logprobs=20,
    )


async def test_without_a_store_there_are_no_store_endpoints(service_without_store):
    assert not (await model_info(service_without_store)).store_endpoints


async def test_while_loading_every_call_answers_not_serving(service):
    service.servicer.load(None)
    assert (await failure_of(model_info(service))).reason_name == "NOT_SERVING"


CALLS = {
    "RegisterRequest": lambda service: service.register(spec()),
    "FindMissingVectors": find_missing,
    "PutVectors": lambda service: service.put(JOY),
    "Generate": lambda service: service.events(ask()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_while_not_serving_only_model_info_answers(service, call):
    service.servicer.set_serving(serving=False)
    failure = await failure_of(call(service))
    assert (failure.reason_name, failure.code) == ("NOT_SERVING", grpc.StatusCode.UNAVAILABLE)
    assert (await model_info(service)).model == "tiny"


async def test_abort_works_while_the_service_drains(service):
    await service.register(spec("r"))
    service.servicer.set_serving(serving=False)
    await service.abort("r")
    service.servicer.set_serving(serving=True)
    assert (await failure_of(service.events(ask("r")))).reason_name == "UNKNOWN_REQUEST"


async def test_registering_returns_missing_vectors_and_the_time_to_live(service):
    response = await service.register(spec("r", CAPTURE, [ADD_JOY]))
    assert (response.request_id, list(response.missing_digests)) == ("r", [JOY.digest])
    assert response.time_to_live.seconds == 600
    assert response.expire_time.seconds == pytest.approx(time.time() + 600, abs=60)
    await service.put(JOY)
    again = await service.register(spec("r", CAPTURE, [ADD_JOY]))
    assert (again.request_id, list(again.missing_digests)) == ("r", [])


async def test_registering_another_spec_under_the_same_id_is_refused(service):
    await service.register(spec("r"))
    failure = await failure_of(service.register(spec("r", CAPTURE)))
    assert (failure.reason_name, failure.metadata) == ("REQUEST_EXISTS", {"request_id": "r"})


async def test_a_bad_spec_is_refused_when_it_is_registered(service):
    failure = await failure_of(service.register(inference_pb2.RequestSpec(model="other")))
    assert failure.metadata == {"model": "other", "serving": "tiny"}


async def test_vectors_are_refused_one_by_one(service):
    nan = vector(1, float("nan"), 1, 1)
    wrong = vector(9, 9, 9, 9)
    wrong.digest = b"x" * 32
    accepted, bad, mismatched, short, also = await service.put(JOY, nan, wrong, vector(1, 2), vector(5, 6, 7, 8))
    assert [accepted.HasField("error"), also.HasField("error")] == [False, False]
    assert [reason_of(item) for item in (bad, mismatched, short)] == [
        "ERROR_REASON_BAD_VALUES",
        "ERROR_REASON_DIGEST_MISMATCH",
        "ERROR_REASON_WRONG_LENGTH",
    ]
    assert [item.digest for item in (accepted, bad, mismatched)] == [JOY.digest, nan.digest, b"x" * 32]
    assert await find_missing(service, JOY.digest, nan.digest, also.digest) == [nan.digest]


def reason_of(result):
    return errors_pb2.ErrorReason.Name(result.error.reason)


async def test_the_error_for_a_long_digest_is_short(service):
    long, good = vector(4, 3, 2, 1), JOY
    long.digest = b"d" * (3 << 20)
    refused, accepted = await service.put(long, good)
    assert refused.error.reason == Reason.ERROR_REASON_DIGEST_MISMATCH
    assert len(refused.digest) == DIGEST_BYTES
    assert not accepted.HasField("error")


async def test_vectors_without_end_are_refused(service):
    endless = [JOY] * (MAX_VECTORS_PER_CALL + 1)
    failure = await failure_of(service.put(*endless))
    assert failure.reason == Reason.ERROR_REASON_INVALID_FIELD
    assert len(await service.put(*endless[:-1])) == MAX_VECTORS_PER_CALL


async def test_missing_vectors_are_found(service):
    await service.put(JOY)
    assert await find_missing(service, b"a" * 32, JOY.digest, b"a" * 32) == [b"a" * 32]


@pytest.mark.parametrize(
    "digests", [[b"short"], [b"%032d" % number for number in range(MAX_DIGESTS_PER_CALL + 1)]], ids=["short", "many"]
)
async def test_bad_digests_are_refused(service, digests):
    failure = await failure_of(find_missing(service, *digests))
    assert (failure.reason_name, failure.metadata) == ("INVALID_FIELD", {"field": "digests"})


async def test_abort_drops_a_registration(service):
    await service.register(spec("r"))
    await service.abort("r")
    assert (await failure_of(service.events(ask("r")))).reason_name == "UNKNOWN_REQUEST"


async def test_abort_of_the_unknown_is_refused(service):
    failure = await failure_of(service.abort("nobody"))
    assert (failure.reason_name, failure.metadata) == ("UNKNOWN_REQUEST", {"request_id": "nobody"})


@pytest.mark.parametrize("call", ["register", "inline"])
async def test_an_unreachable_store_affects_only_captures(call):
    async with running_service(NOWHERE) as service:
        wanted = spec("r", CAPTURE)
        failure = await failure_of(service.register(wanted) if call == "register" else service.events(ask(wanted)))
        assert (failure.reason_name, failure.metadata) == ("STORE_UNREACHABLE", {"endpoint": NOWHERE, "store": NOWHERE})
        assert failure.code == grpc.StatusCode.UNAVAILABLE
        assert NOWHERE in failure.message
        assert not service.engine.calls
        assert (await service.events(ask(spec("r"))))[-1].HasField("finished")


async def test_an_unreachable_store_is_called_again_over_a_new_connection(service, store):
    """The caller who asks for the capture gets the error at once, and may retry."""
    store.away = True
    with pytest.raises(Failure) as caught:
        await service.parts.stores.of("x").check_reachable()
    assert caught.value.reason_name == "STORE_UNREACHABLE"
    assert store.checks == 2


async def test_a_store_that_comes_back_is_found():
    port = ports.reserve()
    async with running_service(f"127.0.0.1:{port}") as service:
        failure = await failure_of(service.register(spec("r", CAPTURE)))
        assert failure.reason_name == "STORE_UNREACHABLE"
        async with listening(add_StoreServiceServicer_to_server, FakeStore(), port):
            await asyncio.wait_for(registered(service, spec("r", CAPTURE)), DEADLINE)


async def registered(service, wanted):
    """Register, and retry as often as needed."""
    while True:
        with suppress(grpc.aio.AioRpcError):
            return await service.register(wanted)


@pytest.mark.parametrize("call", ["register", "inline"])
async def test_without_a_store_captures_are_refused_and_generation_works(service_without_store, call):
    service, wanted = service_without_store, spec("r", CAPTURE)
    failure = await failure_of(service.register(wanted) if call == "register" else service.events(ask(wanted)))
    assert (failure.reason_name, failure.metadata) == ("STORE_UNREACHABLE", {"endpoint": ""})
    assert "--store" in failure.message
    assert (await service.events(ask(spec("r"))))[-1].HasField("finished")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_unary", "RegisterRequest"),
        ("unary_stream", "Generate"),
        ("stream_unary", "PutVectors"),
    ],
)
async def test_malformed_messages_are_the_callers_fault(service, kind, method):
    malformed = b"\xff\xff\xff"
    call = getattr(service.channel, kind)(METHOD + method)(iter([malformed]) if kind == "stream_unary" else malformed)
    failure = await failure_of(call.read() if kind == "unary_stream" else call)
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
    assert (await service.events(ask()))[-1].HasField("finished")


async def test_a_message_over_the_limit_is_refused(service):
    too_long = ask(ids=[1 << 20] * (2 << 20))
    assert too_long.ByteSize() > MAX_MESSAGE_BYTES
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(service.endpoint, options=options) as channel:
        call = channel.unary_stream(METHOD + "Generate")(too_long.SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await service.events(ask()))[-1].HasField("finished")


async def test_an_unexpected_exception_is_reported_only_by_its_incident_number(service, monkeypatch):
    def defect(digests):
        raise KeyError("secret")

    monkeypatch.setattr(service.cache, "missing", defect)
    failure = await failure_of(find_missing(service, b"a" * 32))
    assert failure.reason_name == "INTERNAL"
    assert failure.metadata["incident"] in failure.message
    assert "secret" not in failure.message


@pytest.mark.parametrize("method", ["GetModelInfo", "PutVectors", "Generate"])
async def test_a_call_that_sends_nothing_is_ended(method):
    async with running_service(first_message_seconds=1.5) as service:
        failure = await failure_of(service.channel.stream_stream(METHOD + method)().read())
        assert failure.reason_name == "CALLER_STALLED"
        assert "No message arrived within 1.5 s" in failure.message
        assert (await service.events(ask()))[-1].HasField("finished")


@pytest.mark.parametrize("method", ["GetModelInfo", "Generate"])
async def test_a_call_that_ends_without_its_message_is_an_error(service, method):
    call = service.channel.stream_stream(METHOD + method)(iter(()))
    failure = await failure_of(call.read())
    assert (failure.reason_name, failure.metadata) == ("INVALID_FIELD", {"field": ""})


async def test_health_watches_and_silent_checks_leave_room_for_calls():
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    request = health_pb2.HealthCheckRequest()
    async with (
        listening(lambda _, server: add_health_and_reflection(server, "x.X", servicer), None, patience=1.5) as endpoint,
        open_aio_channel(endpoint) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for method in (channel.stream_stream("/grpc.health.v1.Health/Check"), reflect):
            assert (await failure_of(method().read())).reason_name == "CALLER_STALLED"
        watches = [stub.Watch(request) for _ in range(MAX_WATCHES)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for call in (stub.Watch(request), reflect(iter([b""]))):
            failure = await failure_of(call.read())
            assert (failure.reason_name, failure.metadata) == ("LIMIT_REACHED", {"limit": "watches"})
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches:
            watch.cancel()
        answers = []
        end = time.monotonic() + 30
        while not answers:  # the server has noticed the end of the calls
            assert time.monotonic() < end
            with suppress(grpc.aio.AioRpcError):
                answers.append(await reflect(iter([b""])).read())
