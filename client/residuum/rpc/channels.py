"""Channels to either service, and the options of channels and servers.

gRPC silently ignores options with unknown names. So all options are listed here, with reasons, and a test compares
their names with gRPC's own header.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from residuum.rpc import bearer, tracing
from residuum.rpc.credentials import Credentials
from residuum.wire.limits import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_RETRIED = {
    "residuum.v1.InferenceService": ("GetModelInfo", "RegisterRequest", "FindMissingVectors"),
    "residuum.v1.StoreService": ("OpenCapture", "SealCapture", "GetCapture", "ListCaptures", "GetStats"),
}
"""Idempotent unary calls, which gRPC may retry. The application resumes streams. A repeated DeleteCapture would fail
with NOT_FOUND."""

_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": service, "method": method} for service, methods in _RETRIED.items() for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # A chunk has at most 2 MiB, so a larger message is a bug and must fail.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Detects within 80 s, even on an idle stream, that a peer is gone. The servers allow this ping rate.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # gRPC's default backoff grows to two minutes. This one, with its jitter of 20%, is shorter than the time that the
    # retries below take (at least 1.04 s). So a retried call reaches a service that has just restarted.
    ("grpc.max_reconnect_backoff_ms", 800),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this is the timeout for connecting. A busy service may be slow to complete the handshake.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    # gRPC retries idempotent unary calls while the service is unavailable, as `_SERVICE_CONFIG` says.
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Channels to one address must not share a connection: a bulk read would delay the unary calls.
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of every client channel."""

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Allow the clients' keepalive pings. The default minimum of five minutes would close their connections.
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A new connection must complete its HTTP/2 handshake in time. A connection without calls is closed after 10
    # minutes; its client's next call opens another.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # Limits on a caller's headers, tokens and trace included. These are gRPC's defaults, fixed against changes.
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # No compression (only bit 0, "none"). gRPC decompresses before it checks the size, and 4 MiB can expand to 4 GiB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Two servers must never share a port: the second must fail instead of taking half of the calls.
    ("grpc.so_reuseport", 0),
)
"""Options of every server."""


SERVER_NAME = "grpc.ssl_target_name_override"
"""The channel option for the name that the server's certificate must have."""


def open_channel(
    endpoint: str, *, credentials: Credentials | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Open a channel to a service. It connects on first use. Open it after any fork.

    Args:
        endpoint: The service's address, host:port.
        credentials: TLS and token; None for neither.
        options: gRPC options that override `CHANNEL_OPTIONS`.

    Raises:
        CredentialsError: The credentials cannot be used, or not with this endpoint.
    """
    credentials = credentials or Credentials()
    credentials.check_endpoint(endpoint)
    merged = _with_defaults(options, credentials)
    secure = _channel_credentials(credentials)
    traced = [tracing.client_interceptor()] if tracing.is_on() else []
    if secure is not None:
        return _intercepted(grpc.secure_channel(endpoint, secure, options=merged), traced)
    channel = grpc.insecure_channel(endpoint, options=merged)
    tokens = [bearer.interceptor(credentials.token_source())] if credentials.has_token else []
    return _intercepted(channel, [*traced, *tokens])


def open_aio_channel(
    endpoint: str, *, credentials: Credentials | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """Open an asyncio channel to a service, for use in the running event loop.

    Args:
        endpoint: The service's address, host:port.
        credentials: TLS and token; None for neither.
        options: gRPC options that override `CHANNEL_OPTIONS`.

    Raises:
        CredentialsError: The credentials cannot be used, or not with this endpoint.
    """
    credentials = credentials or Credentials()
    credentials.check_endpoint(endpoint)
    merged = _with_defaults(options, credentials)
    secure = _channel_credentials(credentials)
    traced = tracing.aio_client_interceptors() if tracing.is_on() else []
    if secure is not None:
        return grpc.aio.secure_channel(endpoint, secure, options=merged, interceptors=traced or None)
    tokens = bearer.aio_interceptors(credentials.token_source()) if credentials.has_token else []
    return grpc.aio.insecure_channel(endpoint, options=merged, interceptors=[*traced, *tokens] or None)


def _intercepted(channel: grpc.Channel, interceptors: Sequence[grpc.UnaryUnaryClientInterceptor]) -> grpc.Channel:
    return grpc.intercept_channel(channel, *interceptors) if interceptors else channel


def _channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials | None:
    """Return the credentials of a TLS channel; None for plain text."""
    if credentials.tls is None:
        return None
    channel = credentials.tls.channel_credentials()
    if not credentials.has_token:
        return channel
    return grpc.composite_channel_credentials(channel, bearer.call_credentials(credentials.token_source()))


def _with_defaults(options: Sequence[tuple[str, Any]], credentials: Credentials) -> list[tuple[str, Any]]:
    # Pass each name once: of two values for one name, gRPC takes the first.
    name = credentials.tls.server_name if credentials.tls else None
    return list({**dict(CHANNEL_OPTIONS), **({SERVER_NAME: name} if name else {}), **dict(options)}.items())
