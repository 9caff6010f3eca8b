"""How the address of a service is written: host:port."""

from __future__ import annotations

import re

_FORM = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s/:\[\]]+):([0-9]{1,5})")
"""A name or an IPv4 address, or an IPv6 address in brackets; then the port."""

_LARGEST_PORT = 65535


def parse_endpoint(endpoint: str, *, listening: bool = False) -> tuple[str, int]:
    """Split "host:port", or "[v6]:port", into its host, with the brackets, and its port.

    Args:
        endpoint: What is split.
        listening: It is an address to listen on: port 0 lets the system choose a free one.

    Raises:
        ValueError: It is not of that form, or there is no such port.
    """
    found = _FORM.fullmatch(endpoint)
    if found is None:
        raise ValueError(f"{endpoint!r} is not host:port")
    host, port = found[1], int(found[2])
    first = 0 if listening else 1
    if not first <= port <= _LARGEST_PORT:
        raise ValueError(f"{endpoint!r} is not host:port: ports are {first} to {_LARGEST_PORT}")
    return host, port
