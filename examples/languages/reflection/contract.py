"""The services' contract, read by server reflection: calls without generated stubs."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import EnumDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from typing_extensions import Self

DOMAIN = "residuum.dev"


class Service:
    """A service of the contract. Methods are called by name, with requests as dictionaries in protobuf's JSON form."""

    def __init__(self, endpoint: str, name: str) -> None:
        """Connect, and read the service's methods and messages."""
        self._channel = open_channel(endpoint)
        # The pool asks the server once for each file that it needs.
        self._pool = DescriptorPool(ProtoReflectionDescriptorDatabase(self._channel))
        try:
            self._service = self._pool.FindServiceByName(name)
        except KeyError:
            raise SystemExit(f"{endpoint} has no service {name}.") from None
        self._package = name.rpartition(".")[0]

    def unary(self, method: str, request: dict[str, Any], *, timeout: float = 90.0) -> Any:
        """Make a call with one request and one answer."""
        described = self._service.methods_by_name[method]
        call = self._channel.unary_unary(_path(described), _serialize, _parser(described))
        return call(_message(described, request), timeout=timeout)

    def send(self, method: str, requests: Iterable[dict[str, Any]], *, timeout: float = 90.0) -> Any:
        """Make a call with a stream of requests and one answer."""
        described = self._service.methods_by_name[method]
        call = self._channel.stream_unary(_path(described), _serialize, _parser(described))
        return call((_message(described, request) for request in requests), timeout=timeout)

    def stream(self, method: str, request: dict[str, Any]) -> Any:
        """Make a call with a stream of answers. Return an iterator, which can be cancelled."""
        described = self._service.methods_by_name[method]
        call = self._channel.unary_stream(_path(described), _serialize, _parser(described))
        return call(_message(described, request))

    def enum(self, name: str) -> EnumDescriptor:
        """Return an enum of the contract, such as "Encoding"."""
        return self._pool.FindEnumTypeByName(f"{self._package}.{name}")

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_channel(endpoint: str) -> grpc.Channel:
    """Return a channel to either service. It reads the same environment variables as residuum's own client.

    Raises:
        SystemExit: The token would be sent to another machine in plain text.
    """
    authority, token = _file("RESIDUUM_TLS_CA"), os.environ.get("RESIDUUM_TOKEN", "")
    if authority is None:
        insecure = os.environ.get("RESIDUUM_INSECURE") == "1"
        if token and not insecure and not _is_loopback(endpoint):
            raise SystemExit(
                f"The token would be sent to {endpoint} in plain text. Set RESIDUUM_TLS_CA, or RESIDUUM_INSECURE=1 to "
                "send it anyway."
            )
        channel = grpc.insecure_channel(endpoint)
    else:
        name = os.environ.get("RESIDUUM_TLS_SERVER_NAME")
        channel = grpc.secure_channel(
            endpoint,
            grpc.ssl_channel_credentials(authority, _file("RESIDUUM_CLIENT_KEY"), _file("RESIDUUM_CLIENT_CERT")),
            [("grpc.ssl_target_name_override", name)] if name else None,
        )
    return grpc.intercept_channel(channel, _Bearer(token)) if token else channel


def describe(error: grpc.RpcError) -> str:
    """Return a line that describes a failed call to the user: `NOT_FOUND (UNKNOWN_CAPTURE): ...`."""
    reason = reason_of(error)
    return f"{error.code().name}{f' ({reason})' if reason else ''}: {error.details()}"


def reason_of(error: grpc.RpcError) -> str:
    """Return the reason of a failed call, as in errors.proto; "" if the call did not reach the server."""
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info.reason
    return ""


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,  # reflection itself
):
    """Sends a token with each call."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _intercept(self, proceed: Any, details: Any, request: Any) -> Any:
        with_token = _Details(details, [*(details.metadata or ()), self._header])
        return proceed(with_token, request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_unary = _intercept
    intercept_stream_stream = _intercept


class _Details(grpc.ClientCallDetails):
    """The details of a call, with changed metadata."""

    def __init__(self, details: Any, metadata: list[tuple[str, str]]) -> None:
        self.method, self.timeout, self.credentials = details.method, details.timeout, details.credentials
        self.wait_for_ready, self.compression = details.wait_for_ready, details.compression
        self.metadata = metadata


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _message(method: MethodDescriptor, request: dict[str, Any]) -> Message:
    return ParseDict(request, GetMessageClass(method.input_type)())


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _parser(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.output_type).FromString


def _file(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    return Path(path).read_bytes() if path else None


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # the name of another machine, such as 127.0.0.1.example
