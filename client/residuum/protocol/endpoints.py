"""How an endpoint is written. No I/O: both clients use it."""

from __future__ import annotations

from residuum.exceptions import InvalidRequest


def check_endpoint(endpoint: str) -> str:
    """Return an endpoint if it has the form host:port.

    Raises:
        InvalidRequest: It has not.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16 or "//" in host:
        raise InvalidRequest(
            f"{endpoint!r} is not an endpoint: write host:port, such as localhost:50051.", reason="INVALID_FIELD"
        )
    return endpoint
