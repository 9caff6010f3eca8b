"""Sending a bearer token with each call.

Over TLS by gRPC's own call credentials, which it never sends over anything else. A connection in plain text has none,
so there interceptors put the token into the metadata; whether that may be is decided before (`Credentials`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

from residuum.rpc.credentials import CredentialsError, TokenSource

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = "authorization"
"""The name of the metadata that carries the token."""

SCHEME = "Bearer "
"""What its value begins with."""


def call_credentials(source: TokenSource) -> grpc.CallCredentials:
    """Return what sends a token over TLS."""
    return grpc.metadata_call_credentials(_Plugin(source), name="residuum-token")


def interceptor(source: TokenSource) -> grpc.UnaryUnaryClientInterceptor:
    """Return what sends a token over a sync channel in plain text."""
    return _Interceptor(source)


def aio_interceptors(source: TokenSource) -> Sequence[grpc.aio.ClientInterceptor]:
    """Return what sends a token over an asyncio channel in plain text. It knows an interceptor for one kind of call."""
    return [_AioUnaryUnary(source), _AioUnaryStream(source), _AioStreamUnary(source), _AioStreamStream(source)]


class _Plugin(grpc.AuthMetadataPlugin):
    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        del context
        try:
            callback(((HEADER, SCHEME + self._source.get()),), None)
        except CredentialsError as error:
            callback((), error)


class _Details(NamedTuple):
    """grpc.ClientCallDetails is a face without a constructor."""

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
    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        token = (HEADER, SCHEME + self._source.get())
        metadata = [*(details.metadata or ()), token]
        wait, compression = getattr(details, "wait_for_ready", None), getattr(details, "compression", None)
        sent = _Details(details.method, details.timeout, metadata, details.credentials, wait, compression)
        return continuation(sent, request)

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept
    intercept_stream_stream: Any = _intercept


class _AioInterceptor:
    def __init__(self, source: TokenSource) -> None:
        self._source = source

    async def _intercept(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), (HEADER, SCHEME + self._source.get()))
        return await continuation(details._replace(metadata=metadata), request)


class _AioUnaryUnary(_AioInterceptor, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary: Any = _AioInterceptor._intercept  # noqa: SLF001 - its base's


class _AioUnaryStream(_AioInterceptor, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream: Any = _AioInterceptor._intercept  # noqa: SLF001 - its base's


class _AioStreamUnary(_AioInterceptor, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary: Any = _AioInterceptor._intercept  # noqa: SLF001 - its base's


class _AioStreamStream(_AioInterceptor, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream: Any = _AioInterceptor._intercept  # noqa: SLF001 - its base's
