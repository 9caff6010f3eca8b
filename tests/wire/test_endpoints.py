"""How the address of a service is written."""

from __future__ import annotations

import pytest

from residuum.wire.endpoints import parse_endpoint


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("localhost:50051", ("localhost", 50051)),
        ("store_1.a-b.example:1", ("store_1.a-b.example", 1)),
        ("store.example.:1", ("store.example.", 1)),
        ("größe.example:1", ("größe.example", 1)),
        ("127.0.0.1:65535", ("127.0.0.1", 65535)),
        ("[::1]:50051", ("[::1]", 50051)),
        ("[fe80::1%eth0]:50051", ("[fe80::1%eth0]", 50051)),
    ],
)
def test_host_and_port(endpoint, parts):
    assert parse_endpoint(endpoint) == parse_endpoint(endpoint, listening=True) == parts


@pytest.mark.parametrize(
    "endpoint",
    [
        "", ":", "localhost", ":1", "host:", "host:port", "host:-1", "host:+1", "host: 1", "host:1 ", "host:1\n",
        "host:99999", "host:65536", "host:100000000", "host:²", "host:١",
        "http://localhost:50051", "//host:1", "host/path:1", "dns:///host:1", "a host:1", "a:b:1",
        "store..example:1", ".example:1", "a" * 64 + ".example:1",
        "::1:50051", "[::1:50051", "::1]:50051", "[]:1", "[host]:1",
    ],
)  # fmt: skip
def test_invalid_endpoints(endpoint):
    for listening in (False, True):
        with pytest.raises(ValueError, match="is not host:port"):
            parse_endpoint(endpoint, listening=listening)


def test_port_0_is_only_for_listening():
    assert parse_endpoint("127.0.0.1:0", listening=True) == ("127.0.0.1", 0)
    with pytest.raises(ValueError, match="ports are 1 to 65535"):
        parse_endpoint("127.0.0.1:0")
