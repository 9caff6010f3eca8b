"""Debian's Chromium, and the command `residuum ui` as a user starts it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.parse
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import read_line

ROOT = Path(__file__).parents[2]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
AWAY = "Failed to load resource: "
"""How the browser's message about an answer with an error status begins. Only tests of failures expect it."""


def chromium() -> str | None:
    """Return the browser's path; None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def serving(endpoint: str, gallery: Path, *flags: str):
    """Run `residuum ui`, and yield the address that it prints."""
    command = [sys.executable, "-m", "residuum", "ui", "--endpoint", endpoint, "--port", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'client'}:{ROOT}"}
    process = subprocess.Popen(
        [*command, "--gallery", str(gallery), *flags], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield json.loads(read_line(process.stdout, "the address of the page"))["address"]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


class Watched:
    """A page of the browser. It notes what must not happen: errors on the console, and requests to other hosts."""

    def __init__(self, context, address: str) -> None:
        self.address = address
        self.base = address.partition("?")[0]
        self.errors: list[str] = []
        self.expects_failures = False
        self.page = context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        self.page.on("request", self._request)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.goto(address)
        self.page.get_by_role("navigation", name="Views").wait_for()  # the token has been traded for the cookie

    def _console(self, message) -> None:
        if message.type in {"error", "warning"} and not (self.expects_failures and AWAY in message.text):
            self.errors.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _request(self, request) -> None:
        found = urllib.parse.urlsplit(request.url)
        if found.scheme not in {"blob", "data"} and f"{found.scheme}://{found.netloc}/" != self.base:
            self.errors.append(f"request to {request.url}")

    def open(self, view: str, **state: object):
        """Open a view by its link, and return the page."""
        query = urllib.parse.urlencode(state)
        self.page.goto(f"{self.base}#{view}{'?' if query else ''}{query}")
        self.page.get_by_role("heading", level=1).wait_for()
        return self.page
