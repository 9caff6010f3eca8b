"""Addresses: those of services, host:port, and how the URLs of archives begin."""

from __future__ import annotations

import re

ARCHIVE_SCHEMES = ("s3://", "gs://", "az://", "file:///")
"""How the URL of an archive may begin."""

_FORM = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s/:\[\]]+):([0-9]{1,5})")
"""A name or an IPv4 address, or an IPv6 address in brackets; then the port."""

_LARGEST_PORT = 65535


def parse_endpoint(endpoint: str, *, listening: bool = False) -> tuple[str, int]:
    """Return the host and the port of "host:port" or "[v6]:port". An IPv6 host keeps its brackets.

    Args:
        endpoint: The address.
        listening: Whether it is an address to listen on. Then port 0 is allowed: the system chooses a free port.

    Raises:
        ValueError: The address has another form, or the port is out of range.
    """
    found = _FORM.fullmatch(endpoint)
    if found is None:
        raise ValueError(f"{endpoint!r} is not host:port")
    host, port = found[1], int(found[2])
    try:
        host.encode("idna")  # as the lookup of the name does
    except UnicodeError:
        raise ValueError(f"{endpoint!r} is not host:port: no system can look up that name") from None
    first = 0 if listening else 1
    if not first <= port <= _LARGEST_PORT:
        raise ValueError(f"{endpoint!r} is not host:port: ports are {first} to {_LARGEST_PORT}")
    return host, port
