"""Logs: one format for our own lines and those of libraries, and no failures because of logging."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

PROGRAM = """
import logging, sys
from svc_common.logs import bind_request, configure_logs, get_logger, request_scope
configure_logs("info")
log = get_logger("residuum.test")
"""


def lines_of(program):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, check=True, timeout=60
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_own_lines_and_those_of_libraries_have_one_form():
    own, library = lines_of("""
with request_scope():
    bind_request("r")
    log.info("done", tokens=3)
    logging.getLogger("grpc").warning("slow %s", "peer")
log.debug("not asked for")
logging.getLogger("grpc").debug("nor this")
""")
    assert own.pop("timestamp")
    assert library.pop("timestamp")
    assert own == {"event": "done", "tokens": 3, "request_id": "r", "logger": "residuum.test", "level": "info"}
    assert library == {"event": "slow peer", "request_id": "r", "logger": "grpc", "level": "warning"}


def test_an_exception_is_logged_with_its_traceback():
    (line,) = lines_of("""
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed", incident="x")
""")
    assert (line["event"], line["level"], line["incident"]) == ("failed", "error", "x")
    assert "ZeroDivisionError" in line["exception"]


def test_an_exception_on_a_terminal_shows_no_values():
    program = """
def reply(prompt):
    1 / 0
try:
    reply("a secret of the user")
except ZeroDivisionError:
    log.exception("failed")
"""
    terminal, stderr = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", PROGRAM + program], stderr=stderr, check=True, timeout=60)
        os.close(stderr)
        shown = b""
        with suppress(OSError):  # EIO at the end
            while data := os.read(terminal, 1 << 16):
                shown += data
    finally:
        os.close(terminal)
    assert b"ZeroDivisionError: division by zero" in shown
    assert shown.count(b"a secret of the user") == 0


@pytest.mark.parametrize("loss", ["sys.stderr.close()", "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"])
def test_an_unwritable_log_raises_no_error(loss):
    program = f"{PROGRAM}\n{loss}\nlog.info('lost')\nprint('served', flush=True)\n__import__('os')._exit(0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "served\n"
