"""Every method of both services, from their descriptors: which rights may call it, and the errors for others."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from residuum.rpc.channels import open_aio_channel
from residuum.rpc.credentials import Credentials
from residuum.rpc.errors import failure_from_rpc_error
from residuum.v1 import inference_pb2, store_pb2
from svc_common.security import access
from svc_common.security.access import Access, check_table

STORE, INFERENCE = "residuum.v1.StoreService", "residuum.v1.InferenceService"
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"

RIGHTS = ("generate", "read", "write", "admin")
ANY, OPEN = "any", "open"

EXPECTED = {
    f"/{INFERENCE}/GetModelInfo": ANY,
    f"/{INFERENCE}/RegisterRequest": "generate",
    f"/{INFERENCE}/FindMissingVectors": "generate",
    f"/{INFERENCE}/PutVectors": "generate",
    f"/{INFERENCE}/PutSAE": "generate",
    f"/{INFERENCE}/Generate": "generate",
    f"/{INFERENCE}/UpdateSteering": "generate",
    f"/{INFERENCE}/Abort": "generate",
    f"/{INFERENCE}/Unembed": "generate",
    f"/{STORE}/OpenCapture": "write",
    f"/{STORE}/OpenCaptures": "write",
    f"/{STORE}/AppendChunks": "write",
    f"/{STORE}/SealCapture": "write",
    f"/{STORE}/SealCaptures": "write",
    f"/{STORE}/RenewLease": "write",
    f"/{STORE}/GetCapture": "read",
    f"/{STORE}/ListCaptures": "read",
    f"/{STORE}/ReadChunks": "read",
    f"/{STORE}/ReadCaptures": "read",
    f"/{STORE}/Search": "read",
    f"/{STORE}/DeleteCapture": "generate",
    f"/{STORE}/DeleteCaptures": "generate",
    f"/{STORE}/LabelCapture": "generate",
    f"/{STORE}/GetStats": ANY,
    f"/{STORE}/DescribeStore": ANY,
    f"/{REFLECTION}/ServerReflectionInfo": ANY,
    f"/{HEALTH}/Check": OPEN,
    f"/{HEALTH}/Watch": OPEN,
    f"/{HEALTH}/List": OPEN,
}
"""A second copy of the table of rights, so that a change of the table must be made in both places."""

REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def methods_of(*services):
    found = [descriptor_pool.Default().FindServiceByName(service) for service in services]
    return {f"/{service.full_name}/{method.name}": method for service in found for method in service.methods}


def test_every_method_is_in_the_list():
    assert health_pb2.DESCRIPTOR
    assert reflection_pb2.DESCRIPTOR
    found = set(methods_of(STORE, INFERENCE, HEALTH, REFLECTION))
    assert found | {f"/{HEALTH}/List"} == set(EXPECTED)  # older versions of the health service lack List
    files = (inference_pb2.DESCRIPTOR, store_pb2.DESCRIPTOR)
    ours = {service.full_name for file in files for service in file.services_by_name.values()}
    assert ours == {STORE, INFERENCE}


def test_the_page_about_security_names_every_method_in_the_row_of_its_right():
    text = (Path(__file__).resolve().parents[2] / "docs/operations/security.md").read_text()
    for name, right in EXPECTED.items():
        if name.startswith((f"/{STORE}/", f"/{INFERENCE}/")):
            row = "any token" if right == ANY else f"`{right}`"
            assert re.search(rf"^\| {row} \|.*`{name.rpartition('/')[2]}`", text, re.MULTILINE), name


def test_a_method_without_a_required_right_fails_at_startup(monkeypatch):
    check_table([STORE, INFERENCE], EXPECTED)
    monkeypatch.delitem(access.RIGHTS, f"/{STORE}/ReadChunks")
    with pytest.raises(RuntimeError, match=r"ReadChunks has no required right"):
        Access(None, [STORE])
    Access(None, [INFERENCE])


async def outcome(endpoint, name, method, token):
    """Call a method with an empty message. Return the gRPC code and the reason."""
    credentials = Credentials(token=token) if token else None
    async with open_aio_channel(endpoint, credentials=credentials) as channel:
        kinds = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        call = kinds[method.client_streaming, method.server_streaming](name)(
            iter([]) if method.client_streaming else b"", timeout=20
        )
        try:
            if method.server_streaming:
                with contextlib.suppress(StopAsyncIteration):
                    await anext(aiter(call))
                call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError as error:
            failure = failure_from_rpc_error(error)
            return error.code(), failure.reason_name if failure else ""
        return grpc.StatusCode.OK, ""


@pytest.fixture(params=["store", "inference"])
async def service(request, tokens, store, inference):
    """An endpoint that requires tokens, and its methods."""
    if request.param == "inference":
        yield await inference(tokens=tokens.path), methods_of(INFERENCE, HEALTH, REFLECTION)
    else:
        with store(tokens=tokens.path) as endpoint:
            yield endpoint, methods_of(STORE, HEALTH, REFLECTION)


@pytest.mark.parametrize("which", ["no token", "a wrong token", "an expired token"])
async def test_calls_without_a_valid_token_are_unauthenticated(service, tokens, which):
    endpoint, methods = service
    token = {"no token": "", "a wrong token": "rsd_wrong", "an expired token": tokens.add("alice", *RIGHTS, days=-1)}
    for name, method in methods.items():
        code, reason = await outcome(endpoint, name, method, token[which])
        if EXPECTED[name] == OPEN:
            assert code is grpc.StatusCode.OK, name
        else:
            assert (code, reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"), name


@pytest.mark.parametrize("right", RIGHTS)
async def test_a_token_with_one_right(service, tokens, right):
    endpoint, methods = service
    token = tokens.add("alice", right)
    for name, method in methods.items():
        code, reason = await outcome(endpoint, name, method, token)
        if EXPECTED[name] in {OPEN, ANY, right} or right == "admin":
            assert code not in REFUSED, (name, code, reason)
        else:
            assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"), name


async def test_concurrent_callers_are_told_apart(service, tokens):
    """The server tells callers apart whose calls share threads and the event loop."""
    endpoint, methods = service
    given = {right: tokens.add("alice", right) for right in RIGHTS}

    async def check(name, right):
        code, _ = await outcome(endpoint, name, methods[name], given[right])
        assert (code in REFUSED) == (EXPECTED[name] not in {OPEN, ANY, right} and right != "admin"), (name, right)

    await asyncio.gather(*(check(name, right) for name in methods for right in RIGHTS if EXPECTED[name] != OPEN))


async def test_an_unknown_method_is_unimplemented(service, tokens):
    endpoint, methods = service
    unknown = next(iter(methods)).rpartition("/")[0] + "/Nothing"
    for token in ("", tokens.add("alice", "admin")):
        code, _ = await outcome(endpoint, unknown, next(iter(methods.values())), token)
        assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "{}")],
        [("authorization", "Basic {}")],
        [("authorization", "bearer  {}")],
        [("authorization", "Bearer {}x")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer {}"), ("authorization", "Bearer {}")],
        [("authorization-bin", b"Bearer {}")],
    ],
)
async def test_malformed_authorization_headers_are_refused(service, tokens, headers):
    endpoint, methods = service
    token = tokens.add("alice", "admin")
    sent = [(key, value.format(token) if isinstance(value, str) else value) for key, value in headers]
    name = next(name for name in methods if EXPECTED[name] == ANY and name.startswith("/residuum"))
    async with open_aio_channel(endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary(name)(b"", metadata=sent, timeout=20)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert token not in str(raised.value)
