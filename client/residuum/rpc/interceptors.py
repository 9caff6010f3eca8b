"""Wraps every call of a client in one function. gRPC has a class for each kind of call, in each of its two APIs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Around = Callable[[Callable[..., Any], Any, Any], Any]
"""Called as around(continuation, details, request); returns the call that the continuation makes. `request` is one
message or an iterator of messages."""

AioAround = Callable[[Callable[..., Any], Any, Any], Awaitable[Any]]
"""The same for asyncio."""


def around_calls(around: Around) -> grpc.UnaryUnaryClientInterceptor:
    """Return an interceptor of sync channels that wraps calls of every kind."""
    return _Interceptor(around)


def around_aio_calls(around: AioAround) -> Sequence[grpc.aio.ClientInterceptor]:
    """Return interceptors of asyncio channels that wrap calls of every kind: one for each kind of call."""
    return [_AioUnaryUnary(around), _AioUnaryStream(around), _AioStreamUnary(around), _AioStreamStream(around)]


def with_metadata(details: Any, more: Iterable[tuple[str, str | bytes]]) -> grpc.ClientCallDetails:
    """Return the details of a sync call with metadata added."""
    wait, compression = getattr(details, "wait_for_ready", None), getattr(details, "compression", None)
    metadata = [*(details.metadata or ()), *more]
    sent: Any = _Details(details.method, details.timeout, metadata, details.credentials, wait, compression)
    return sent  # type: ignore[no-any-return]


def with_aio_metadata(details: Any, more: Iterable[tuple[str, str | bytes]]) -> grpc.aio.ClientCallDetails:
    """Return the details of an asyncio call with metadata added."""
    changed: grpc.aio.ClientCallDetails = details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), *more))
    return changed


class _Details(NamedTuple):
    """Details of a call; grpc.ClientCallDetails is an interface without a constructor."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _Interceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, around: Around) -> None:
        self._around = around

    def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return self._around(continuation, details, request)

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept
    intercept_stream_stream: Any = _intercept


class _AioInterceptor:
    def __init__(self, around: AioAround) -> None:
        self._around = around

    async def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await self._around(continuation, details, request)


class _AioUnaryUnary(_AioInterceptor, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary: Any = _AioInterceptor._intercept  # noqa: SLF001 - inherited


class _AioUnaryStream(_AioInterceptor, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream: Any = _AioInterceptor._intercept  # noqa: SLF001 - inherited


class _AioStreamUnary(_AioInterceptor, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary: Any = _AioInterceptor._intercept  # noqa: SLF001 - inherited


class _AioStreamStream(_AioInterceptor, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream: Any = _AioInterceptor._intercept  # noqa: SLF001 - inherited
