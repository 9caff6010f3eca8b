"""The app of `residuum ui` on a loopback port, and a caller with the cookie of its page."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import urllib.parse

import numpy as np
import uvicorn

import residuum
from residuum.ui.app import make_app
from tests.waiting import wait_for

TOKEN = "the-token-of-the-tests"


class Page:
    """Serves the app in a thread, and calls it as its page does."""

    def __init__(self, endpoint, gallery, diagnose=list, **connection):
        client = residuum.AsyncClient(endpoint, timeout=10, **connection)
        app = make_app(client, token=TOKEN, gallery=gallery, diagnose=diagnose)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none"))
        self.server.config.timeout_graceful_shutdown = 1
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started or not self.thread.is_alive(), "the app is served")
        assert self.server.started
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        status, headers, _ = self.raw("POST", "/api/session", {"token": TOKEN}, {})
        assert status == 200
        self.cookie = headers["set-cookie"].partition(";")[0]

    def stop(self):
        self.server.should_exit = True
        self.thread.join()

    def raw(self, method, path, body=None, headers=None):
        """Return (status, headers, body) of a request, with exactly these headers."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, content

    def __call__(self, path, body=None, **parameters):
        """Return the JSON of an answer with status 200, or (status, error)."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        method = "GET" if body is None else "POST"
        status, _, content = self.raw(method, f"/api/{path}{query}", body, {"Cookie": self.cookie})
        answer = json.loads(content)
        return answer if status == 200 else (status, answer["error"])

    def events(self, path, body=None, **parameters):
        """Return all events of a stream, as (name, data)."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        method = "GET" if body is None else "POST"
        status, headers, content = self.raw(method, f"/api/{path}{query}", body, {"Cookie": self.cookie})
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream"), content
        found = []
        for block in content.decode().split("\n\n")[:-1]:
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found


def array(text, shape=-1):
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)
