"""Failed connections to a TLS port leave no log lines, so scanners cannot fill a disk."""

from __future__ import annotations

import json
import socket
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from svc_common.launcher import start_store
from tests.waiting import wait_for

KNOCKS = 100


def knock(port, data=b"", tls=None):
    """Connect, send something, and wait until the server closes the connection."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    with suppress(OSError):  # the server may close it at any time, even during the handshake
        if tls:
            connection = tls.wrap_socket(connection, server_hostname="localhost")
        connection.sendall(data)
        while connection.recv(4096):
            pass
    connection.close()


def plain_http(port):
    knock(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def noise(port):
    knock(port, b"\x00\xff" * 200)


def without_certificate(port):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    knock(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", context)


@pytest.fixture
def knocked(tmp_path, authority, server_pair):
    """Lets unauthorised clients connect to a store, and returns its log lines once it has ended."""

    def run(*strangers):
        flags = ["--tls-cert", server_pair.cert, "--tls-key", server_pair.key, "--tls-client-ca", authority.path]
        store = start_store(tmp_path, list(map(str, flags)))
        try:
            port_file = tmp_path / "store.port"
            wait_for(lambda: port_file.exists() or store.process.poll() is not None, "the store's port")
            assert port_file.exists(), store.log.read_text()
            port = urlsplit(f"//{store.endpoint}").port
            for number in range(KNOCKS):
                strangers[number % len(strangers)](port)
        finally:
            store.stop()
        return store.log.read_text().splitlines()

    return run


def test_strangers_leave_no_lines(knocked, monkeypatch):
    for name in ("GRPC_VERBOSITY", "GRPC_TRACE"):
        monkeypatch.delenv(name, raising=False)
    lines = knocked(plain_http, noise, without_certificate)
    events = [json.loads(line)["event"] for line in lines]
    assert "serving" in events
    assert "callers have all rights, for all tenants" in events  # it requires only certificates
    assert len(lines) < 10, events


def test_grpcs_own_log_level_is_respected(knocked, monkeypatch):
    """Without the setting there are this many lines, so the first test is meaningful."""
    monkeypatch.setenv("GRPC_VERBOSITY", "INFO")
    lines = knocked(plain_http)
    assert sum("Handshake failed" in line for line in lines) == KNOCKS
