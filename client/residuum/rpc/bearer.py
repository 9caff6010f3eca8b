"""Sends a bearer token with each call.

Over TLS it uses gRPC's call credentials, which gRPC never sends in plain text. On a plain-text connection, interceptors
put the token into the metadata. `Credentials.check_endpoint` has then decided that this is allowed.
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
"""The metadata key of the token."""

SCHEME = "Bearer "
"""The prefix of the metadata value, before the token."""


def call_credentials(source: TokenSource) -> grpc.CallCredentials:
    """Return call credentials that send a token over TLS."""
    return grpc.metadata_call_credentials(_Plugin(source), name="residuum-token")


def interceptor(source: TokenSource) -> grpc.UnaryUnaryClientInterceptor:
    """Return an interceptor that sends a token over a plain-text sync channel."""

    def send(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(with_metadata(details, [_metadata(source)]), request)

    return around_calls(send)


def aio_interceptors(source: TokenSource) -> Sequence[grpc.aio.ClientInterceptor]:
    """Return interceptors that send a token over a plain-text asyncio channel."""

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
