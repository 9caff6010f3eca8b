"""Calls any method of a service with any bytes, and checks the outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from residuum.rpc.errors import failure_from_rpc_error

FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
"""Codes that no input may cause."""

_BY_GRPC = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
"""Codes of gRPC itself. Every other error must have a reason of the catalogue."""

SECONDS = 20.0
"""A generous timeout for every call."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a call."""

    code: grpc.StatusCode
    text: str
    responses: list[Message]


def methods(service: ServiceDescriptor) -> list[str]:
    """Return the names of all methods of a service."""
    return [item.name for item in service.methods]


class Running:
    """A call that was begun, and its later answer."""

    def __init__(self, method: str, call: Any, *, gets_many: bool) -> None:
        self._method = method
        self._call = call
        self._gets_many = gets_many

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        self._call.cancel()

    def answer(self) -> Answer:
        """Wait for the end of the call."""
        responses: list[Message] = []
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            if self._gets_many:
                responses.extend(self._call)
            else:
                responses.append(self._call.result())
        return _answer(self._method, self._call, responses)


class Caller:
    """Calls methods of a service with raw bytes as messages."""

    def __init__(self, channel: grpc.Channel, service: ServiceDescriptor) -> None:
        self.messages = 0
        """Messages that were sent."""
        self._calls = {}
        for method in service.methods:
            ways = {
                (False, False): channel.unary_unary,
                (False, True): channel.unary_stream,
                (True, False): channel.stream_unary,
                (True, True): channel.stream_stream,
            }
            way = ways[method.client_streaming, method.server_streaming]
            parse = GetMessageClass(method.output_type).FromString
            call = way(f"/{service.full_name}/{method.name}", None, parse)
            self._calls[method.name] = (call, method.client_streaming, method.server_streaming)

    def call(self, method: str, messages: Iterable[bytes]) -> Answer:
        """Make a call and wait for its end."""
        call, _, gets_many = self._calls[method]
        if gets_many:
            return self.begin(method, messages).answer()
        try:  # this costs less than `begin`
            response = call(self._request(method, messages), timeout=SECONDS)
        except grpc.RpcError as error:
            return _answer(method, error, [])
        return Answer(grpc.StatusCode.OK, "", [response])

    def begin(self, method: str, messages: Iterable[bytes]) -> Running:
        """Begin a call."""
        call, _, gets_many = self._calls[method]
        begin = call if gets_many else call.future
        return Running(method, begin(self._request(method, messages), timeout=SECONDS), gets_many=gets_many)

    def _request(self, method: str, messages: Iterable[bytes]) -> Iterator[bytes] | bytes:
        sends_many = self._calls[method][1]
        sent = list(messages) if sends_many else [next(iter(messages))]
        self.messages += len(sent)
        return iter(sent) if sends_many else sent[0]


def _answer(method: str, call: grpc.Call, responses: list[Message]) -> Answer:
    assert call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, f"{method} hangs"
    if call.code() is not grpc.StatusCode.OK:
        check_error(method, call)
    return Answer(call.code(), call.details() or "", responses)


def check_error(method: str, error: grpc.RpcError) -> None:
    """Fail unless an error is one that the contract or gRPC defines for bad input."""
    assert error.code() not in FAULTS, f"{method}: {error.code().name}: {error.details()}"
    known = failure_from_rpc_error(error)
    assert known is not None or error.code() in _BY_GRPC, f"{method}: no reason with {error.code().name}"
    assert len(error.details() or "") < 4096, f"{method}: the error repeats a long input"
