"""Sending a bearer token with each call.

Over TLS by gRPC's own call credentials, which it never sends over anything else. A connection in plain text has none,
so there interceptors put the token into the metadata; whether that may be is decided before (`Credentials`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from residuum.rpc.credentials import CredentialsError, TokenSource
from residuum.rpc.interceptors import around_aio_calls, around_calls, with_aio_metadata, with_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEADER = "authorization"
"""The name of the metadata that carries the token."""

SCHEME = "Bearer "
"""What its value begins with."""


def call_credentials(source: TokenSource) -> grpc.CallCredentials:
    """Return what sends a token over TLS."""
    return grpc.metadata_call_credentials(_Plugin(source), name="residuum-token")


def interceptor(source: TokenSource) -> grpc.UnaryUnaryClientInterceptor:
    """Return what sends a token over a sync channel in plain text."""

    def send(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(with_metadata(details, [_metadata(source)]), request)

    return around_calls(send)


def aio_interceptors(source: TokenSource) -> Sequence[grpc.aio.ClientInterceptor]:
    """Return what sends a token over an asyncio channel in plain text."""

    async def send(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(with_aio_metadata(details, [_metadata(source)]), request)

    return around_aio_calls(send)


def _metadata(source: TokenSource) -> tuple[str, str]:
    return HEADER, SCHEME + source.get()


class _Plugin(grpc.AuthMetadataPlugin):
    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        del context
        try:
            callback((_metadata(self._source),), None)
        except CredentialsError as error:
            callback((), error)
