"""A real S3 server in a process of its own (moto's), and a proxy in front of it that makes it fail."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import select
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

PYTHON = Path(__file__).parents[2] / ".venv-s3" / "bin" / "python"
BUCKET = "captures"

_SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""
"""The server chooses its port: one that is found free before it starts may be taken by then."""


class S3Server:
    """An S3 server with one empty bucket."""

    def __init__(self) -> None:
        if not PYTHON.exists():
            if os.environ.get("RESIDUUM_TEST_S3") == "required":
                pytest.fail(f"{PYTHON} is missing: make .venv-s3/stamp")
            pytest.skip("the S3 server is not installed: make .venv-s3/stamp")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [str(PYTHON), "-c", _SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert self.process.stdout is not None
        is_ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert is_ready, "the S3 server did not start"
        line = self.process.stdout.readline()
        assert line, "the S3 server has ended"
        self.port = int(line)
        self.empty()

    def empty(self) -> None:
        """Delete everything, and make the bucket again."""
        for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
            request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
            urllib.request.urlopen(request).close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


Fault = Callable[["Call"], None]
"""What a proxy does with a call before it passes it on. It may answer itself."""


class AnsweredError(Exception):
    """A fault has answered the call, or broken the connection."""


class Call:
    """A call that a proxy has received."""

    def __init__(self, handler: _Handler, number: int) -> None:
        self.number = number
        """Counted from 1."""
        self.method = handler.command
        self.path = urlsplit(handler.path).path.removeprefix(f"/{BUCKET}")
        self.first_byte = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        """Where the wanted bytes of the object begin."""
        self._handler = handler

    def answer(self, status: int, code: str) -> None:
        """Answer with an error of S3."""
        body = f"<Error><Code>{code}</Code><Message>Made by the test.</Message></Error>".encode()
        self._handler.read_body()
        self._handler.send_response(status)
        self._handler.send_header("Content-Length", str(len(body)))
        self._handler.end_headers()
        if self.method != "HEAD":
            self._handler.wfile.write(body)
        raise AnsweredError

    def cut(self) -> None:
        """Read half of the body, and break the connection."""
        self._handler.rfile.read(int(self._handler.headers.get("Content-Length", 0)) // 2)
        self.drop()

    def drop(self) -> None:
        """Break the connection."""
        self._handler.close_connection = True
        with contextlib.suppress(OSError):
            self._handler.connection.shutdown(socket.SHUT_RDWR)
        raise AnsweredError


class Proxy:
    """Passes calls on to an S3 server, after `before` and before `after`."""

    def __init__(self, port: int) -> None:
        self.port_of_server = port
        self.before: Fault = lambda _: None
        self.after: Fault = lambda _: None
        self.calls = 0
        """Calls that have come."""
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What the environment of a store must have."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def work(self) -> None:
        """End all faults."""
        self.before = self.after = lambda _: None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    proxy: Proxy
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Say nothing: stores that are killed break connections."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _handle(self) -> None:
        proxy = self.server.proxy
        with proxy.lock:
            proxy.calls += 1
            call = Call(self, proxy.calls)
        with contextlib.suppress(AnsweredError):
            proxy.before(call)
            body = self.read_body()
            connection = http.client.HTTPConnection("127.0.0.1", proxy.port_of_server, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            proxy.after(call)
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815 - names of http.server
