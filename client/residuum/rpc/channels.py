"""Channels: how a client of either service connects.

gRPC ignores an option whose name it does not know, silently. So every option stands here, with its reason, and a test
compares the names with those of gRPC's own header.
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
"""Idempotent unary calls. Streams resume in the application; DeleteCapture twice would answer NOT_FOUND."""

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
    # A chunk is at most 2 MiB; a larger message is a mistake and must be loud.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a word is found within 80 s even on a quiet stream. The servers allow this rate.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A service that restarts is found again within seconds; gRPC's own back-off grows to two minutes.
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: how long a connection may take to come about. A busy service greets late, and is there.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    # gRPC's own retries, for idempotent unary calls that found the service away.
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Channels to the same address must not share one connection: a bulk read would hold up the unary calls.
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of every client channel."""

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Allow the clients' keepalive pings; the default minimum of five minutes would end their connections.
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Who connects must speak HTTP/2 within this time, and a connection without a call is closed after a while: the next
    # call of its client opens another.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # What a caller's headers may have, tokens and trace included; gRPC's own limits, kept so that no other holds.
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # No compressed messages (bit 0 is "none"): gRPC unpacks one before it looks at its size, and 4 MiB unpack to 4 GiB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Two servers must never share a port: the second has to fail, not to take half of the calls.
    ("grpc.so_reuseport", 0),
)
"""Options of every server."""


SERVER_NAME = "grpc.ssl_target_name_override"
"""The option that says which name the server's certificate must have."""


def open_channel(
    endpoint: str, *, credentials: Credentials | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Open a channel to host:port. It connects when it is first used; open it after any fork.

    `options` go before those of every channel.

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
    """Open an asyncio channel to host:port, for use in the running event loop.

    `options` go before those of every channel.

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
    """Return what a TLS channel is opened with; None: it is to be in plain text."""
    if credentials.tls is None:
        return None
    channel = credentials.tls.channel_credentials()
    if not credentials.has_token:
        return channel
    return grpc.composite_channel_credentials(channel, bearer.call_credentials(credentials.token_source()))


def _with_defaults(options: Sequence[tuple[str, Any]], credentials: Credentials) -> list[tuple[str, Any]]:
    # Each name once: of two values, gRPC takes the first.
    name = credentials.tls.server_name if credentials.tls else None
    return list({**dict(CHANNEL_OPTIONS), **({SERVER_NAME: name} if name else {}), **dict(options)}.items())
