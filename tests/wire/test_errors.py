"""The error catalogue, through real servers of both gRPC APIs."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from residuum.rpc import channels
from residuum.rpc.errors import CODES, DOMAIN, Failure, Reason, failure_from_rpc_error
from residuum.v1 import errors_pb2
from svc_common.rpc import tracing
from svc_common.rpc.serving import AioErrorInterceptor, ErrorInterceptor, add_health_and_reflection, handler_of

PROTO = Path(__file__).parents[2] / "protos" / "residuum" / "v1" / "errors.proto"
METHODS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


def codes_in_the_comments():
    """Return reason -> gRPC code as documented in errors.proto: `// CODE: words` above `ERROR_REASON_NAME = n;`."""
    text = PROTO.read_text()
    found = {}
    for comment, name in re.findall(r"((?:  //[^\n]*\n)+)  (ERROR_REASON_\w+) = \d+;", text):
        match = re.match(r"\s*// ([A-Z_]+): ", comment)
        if match:
            found[name] = match.group(1)
    return found


def test_every_reason_has_the_code_that_its_comment_says():
    said = codes_in_the_comments()
    assert {Reason.Name(reason): code.name for reason, code in CODES.items()} == said
    assert set(said) == set(Reason.keys()) - {"ERROR_REASON_UNSPECIFIED"}


def test_names_are_what_google_allows_in_error_info():
    for name in Reason.keys():  # noqa: SIM118 - an enum's wrapper is no mapping
        assert re.fullmatch(r"[A-Z][A-Z0-9_]+[A-Z0-9]", name.removeprefix("ERROR_REASON_"))
        assert len(name) <= 63
    assert len(DOMAIN) > 0


FAILURE = Failure(Reason.ERROR_REASON_UNKNOWN_LAYER, "Kein Layer 31 — es gibt 30.", layer=31, layers=30)


def handlers(behave, *, aio):
    """Return methods of each kind under /residuum.test/ that call `behave`."""

    def plain(request, context):
        behave()
        return b"ok"

    def stream(request, context):
        yield b"first"
        behave()

    async def aio_plain(request, context):
        behave()
        return b"ok"

    async def aio_stream(request, context):
        yield b"first"
        behave()

    one, many = (aio_plain, aio_stream) if aio else (plain, stream)
    made = {
        name: getattr(grpc, f"{name}_rpc_method_handler")(many if name.endswith("stream") else one) for name in METHODS
    }
    return grpc.method_handlers_generic_handler("residuum.test", made)


def call(channel, method):
    """Call a method to its end. Return its gRPC error."""
    request = iter([b"x"]) if method.startswith("stream") else b"x"
    try:
        list(getattr(channel, method)(f"/residuum.test/{method}")(request, timeout=10))
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call succeeded")


async def aio_call(channel, method):
    request = iter([b"x"]) if method.startswith("stream") else b"x"
    answer = getattr(channel, method)(f"/residuum.test/{method}")(request, timeout=10)
    try:
        if method.endswith("stream"):
            _ = [part async for part in answer]
        else:
            await answer
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call succeeded")


class Log:
    def __init__(self):
        self.incidents = []

    def exception(self, event, *, method, incident):
        self.incidents.append((method, incident))


@pytest.fixture
def served():
    """Serve `behave` on a sync server. Yields (endpoint, log)."""
    behaviour, log = [], Log()

    def behave():
        behaviour[0]()

    server = grpc.server(ThreadPoolExecutor(4), interceptors=[ErrorInterceptor(log)], options=channels.SERVER_OPTIONS)
    server.add_generic_rpc_handlers([handlers(behave, aio=False)])
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield endpoint, behaviour, log
    server.stop(0).wait()


def fail():
    raise FAILURE


def blunder():
    raise KeyError("secret")


def same(failure):
    return (failure.reason, failure.message, failure.metadata, failure.code) == (
        FAILURE.reason, FAILURE.message, {"layer": "31", "layers": "30"}, grpc.StatusCode.INVALID_ARGUMENT,
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_failure_passes_a_sync_server(served, method):
    endpoint, behaviour, log = served
    behaviour.append(fail)
    with channels.open_channel(endpoint) as channel:
        error = call(channel, method)
    assert same(failure_from_rpc_error(error))
    assert log.incidents == []


@pytest.mark.parametrize("method", METHODS)
def test_an_unexpected_exception_is_logged_and_hidden_from_the_caller(served, method):
    endpoint, behaviour, log = served
    behaviour.append(blunder)
    with channels.open_channel(endpoint) as channel:
        failure = failure_from_rpc_error(call(channel, method))
    assert failure.reason == Reason.ERROR_REASON_INTERNAL
    assert "secret" not in failure.message
    assert log.incidents == [(f"/residuum.test/{method}", failure.metadata["incident"])]


class Noting(grpc.ServerInterceptor):
    """Sets an event when a handler waits for a second message."""

    def __init__(self):
        self.waiting = threading.Event()

    def intercept_service(self, continuation, handler_call_details):
        handler = continuation(handler_call_details)

        def noted(messages):
            for message in messages:
                yield message
                self.waiting.set()

        def call(messages, context):
            return handler.stream_stream(noted(messages), context)

        return handler_of(handler, call, handler.request_deserializer)


def test_a_dropped_reflection_stream_is_no_incident():
    """The handler waits for the next request of a caller that has disconnected."""
    log, noting, pool = Log(), Noting(), ThreadPoolExecutor(4)
    server = grpc.server(pool, interceptors=[ErrorInterceptor(log), noting], options=channels.SERVER_OPTIONS)
    add_health_and_reflection(server, "residuum.test", health.HealthServicer())
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    gone = threading.Event()

    def requests():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        gone.wait(30)

    with channels.open_channel(endpoint) as channel:
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests())
        assert next(stream).list_services_response.service
        assert noting.waiting.wait(30)
        stream.cancel()
        server.stop(30).wait()
        pool.shutdown(wait=True)  # the handler has ended
        gone.set()
    assert log.incidents == []


def until_gone(context, running):
    """Wait in a handler until gRPC knows that the caller has given up. `running` is set when this begins."""
    gone = threading.Event()
    known = context.add_callback(gone.set)
    running.set()
    assert not known or gone.wait(30)


@pytest.mark.parametrize("method", ["stream_unary", "stream_stream"])
@pytest.mark.parametrize("timeout", [None, 0.5])
def test_a_call_that_ends_before_its_message_is_read_is_no_incident(monkeypatch, method, timeout):
    """gRPC raises an error in the handler: a caller that gives up, or is past its deadline, is no fault of ours."""
    log, ended, codes, running = Log(), [], [], threading.Event()
    monkeypatch.setattr(tracing, "end_span", lambda _span, code: codes.append(code))

    def one(messages, context):
        until_gone(context, running)
        return next(messages)

    def many(messages, context):
        until_gone(context, running)
        yield next(messages)

    handler = getattr(grpc, f"{method}_rpc_method_handler")(many if method == "stream_stream" else one)
    pool = ThreadPoolExecutor(1)
    interceptors = [tracing.TracingInterceptor(), ErrorInterceptor(log, lambda *call: ended.append(call[:2]))]
    server = grpc.server(pool, interceptors=interceptors, options=channels.SERVER_OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("residuum.test", {method: handler})])
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with channels.open_channel(endpoint) as channel:
        ask = getattr(channel, method)(f"/residuum.test/{method}")
        ask = ask.future if method == "stream_unary" else ask
        call = ask(iter([b"x"]), timeout=timeout)
        if timeout is not None and not running.wait(5):  # a busy machine: the call has ended before the handler began
            call = ask(iter([b"x"]), timeout=20)
        assert running.wait(30)
        if timeout is None:
            call.cancel()
        pool.submit(lambda: None).result(30)  # the handler has ended: it had the only thread
        server.stop(30).wait()
        pool.shutdown(wait=True)
    assert log.incidents == []
    assert ended == [(method, "CANCELLED")]
    assert codes == [grpc.StatusCode.CANCELLED]


class Refusing(grpc.ServerInterceptor):
    def intercept_service(self, continuation, handler_call_details):
        return grpc.stream_stream_rpc_method_handler(lambda messages, context: fail())


def test_a_refusal_of_an_interceptor_passes_for_any_method():
    """For example, the token is missing, or there are too many reflection streams."""
    server = grpc.server(ThreadPoolExecutor(1), interceptors=[ErrorInterceptor(Log()), Refusing()])
    add_health_and_reflection(server, "residuum.test", health.HealthServicer())
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with channels.open_channel(endpoint) as channel, pytest.raises(grpc.RpcError) as refused:
        next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([])))
    assert same(failure_from_rpc_error(refused.value))
    server.stop(0).wait()


async def aio_served(behave, log, inside):
    server = grpc.aio.server(interceptors=[AioErrorInterceptor(log)], options=channels.SERVER_OPTIONS)
    server.add_generic_rpc_handlers([handlers(behave, aio=True)])
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        return await inside(endpoint)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("by_thread", [False, True])
async def test_a_failure_passes_an_asyncio_server(method, by_thread):
    async def inside(endpoint):
        if by_thread:  # called by a sync client
            with channels.open_channel(endpoint) as channel:
                return await asyncio.to_thread(call, channel, method)
        async with channels.open_aio_channel(endpoint) as channel:
            return await aio_call(channel, method)

    assert same(failure_from_rpc_error(await aio_served(fail, Log(), inside)))


@pytest.mark.parametrize("method", METHODS)
async def test_an_unexpected_exception_of_an_asyncio_server(method):
    log = Log()

    async def inside(endpoint):
        async with channels.open_aio_channel(endpoint) as channel:
            return await aio_call(channel, method)

    failure = failure_from_rpc_error(await aio_served(blunder, log, inside))
    assert failure.reason == Reason.ERROR_REASON_INTERNAL
    assert log.incidents == [(f"/residuum.test/{method}", failure.metadata["incident"])]


def test_an_error_that_is_not_ours():
    with channels.open_channel("127.0.0.1:1") as channel:
        assert failure_from_rpc_error(call(channel, "unary_unary")) is None


def test_item_errors():
    item = FAILURE.to_item_error()
    assert (item.reason, item.message, dict(item.metadata)) == (FAILURE.reason, FAILURE.message, FAILURE.metadata)
    assert FAILURE.metadata
    back = Failure.of_item(item)
    assert back is not None
    assert (back.reason, back.message, back.metadata) == (FAILURE.reason, FAILURE.message, FAILURE.metadata)
    assert FAILURE.reason_name == "UNKNOWN_LAYER"
    assert isinstance(item, errors_pb2.ItemError)


def test_the_interceptors_use_the_services_log():
    ErrorInterceptor(structlog.get_logger("x"))
    AioErrorInterceptor(structlog.get_logger("x"))


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f600", "\0"])
def test_the_answer_arrives_however_long_the_request(served, letter):
    """Headers have at most 8 KiB; a longer status would be lost, with its reason."""
    endpoint, behaviour, _ = served
    long = letter * 100_000
    failure = Failure(Reason.ERROR_REASON_UNKNOWN_REQUEST, f"There is no request {long}.", request_id=long, other=long)

    def fail_at_length():
        raise failure

    behaviour.append(fail_at_length)
    with channels.open_channel(endpoint) as channel:
        got = failure_from_rpc_error(call(channel, "unary_unary"))
    assert (got.reason, got.message, got.metadata) == (failure.reason, failure.message, failure.metadata)
    assert len(got.message.encode()) <= 1024
    assert got.message.endswith("…")


def test_the_digests_of_missing_vectors_arrive_complete(served):
    endpoint, behaviour, _ = served
    digests = ",".join(["d" * 64] * 64)

    def miss():
        raise Failure(Reason.ERROR_REASON_MISSING_VECTORS, "Send them with PutVectors." * 6, digests=digests)

    behaviour.append(miss)
    with channels.open_channel(endpoint) as channel:
        got = failure_from_rpc_error(call(channel, "unary_unary"))
    assert got.metadata == {"digests": digests}


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_message_that_unpacks_to_more_than_it_is_gets_no_room(served, algorithm):
    endpoint, behaviour, _ = served
    behaviour.append(fail)
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(endpoint, options, algorithm) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/residuum.test/unary_unary")(bytes(64 << 20), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "Compression" in caught.value.details()
