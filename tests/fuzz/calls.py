"""Calls any method of a service with any bytes, and checks the outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from residuum.rpc.errors import failure_from_rpc_error

FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
"""Codes that no input may cause."""

_BY_GRPC = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Codes of gRPC itself, and of the caller's own deadline. Every other error must have a reason of the catalogue."""

SECONDS = 20.0
"""A generous timeout for every call that waits for nothing."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a call."""

    code: grpc.StatusCode
    text: str
    responses: list[Message]


def methods(service: ServiceDescriptor) -> list[str]:
    """Return the names of all methods of a service."""
    return [item.name for item in service.methods]


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

    def call(self, method: str, messages: Iterable[bytes], seconds: float = SECONDS) -> Answer:
        """Make a call and wait for its end. A call that may last is cancelled after `seconds`."""
        call, sends_many, gets_many = self._calls[method]
        sent = list(messages) if sends_many else [next(iter(messages))]
        self.messages += len(sent)
        request = iter(sent) if sends_many else sent[0]
        responses: list[Message] = []
        try:
            if gets_many:
                _take(call(request, timeout=seconds), responses)
            else:
                responses.append(call(request, timeout=seconds))
        except grpc.RpcError as error:
            check_error(method, error)
            return Answer(error.code(), error.details() or "", responses)
        return Answer(grpc.StatusCode.OK, "", responses)


def _take(stream: Iterable[Message], into: list[Message]) -> None:
    into.extend(stream)


def check_error(method: str, error: grpc.RpcError) -> None:
    """Fail unless an error is one that the contract or gRPC defines for bad input."""
    assert error.code() not in FAULTS, f"{method}: {error.code().name}: {error.details()}"
    known = failure_from_rpc_error(error)
    assert known is not None or error.code() in _BY_GRPC, f"{method}: no reason with {error.code().name}"
    assert len(error.details() or "") < 4096, f"{method}: the error repeats a long input"
