"""The command `residuum ui`, as a user starts and stops it."""

import json
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request

import pytest

pytest.importorskip("starlette")


def start(endpoint, *flags):
    command = [sys.executable, "-m", "residuum", "ui", "--endpoint", endpoint, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_page_is_served_until_ctrl_c(endpoint, tmp_path):
    with start(endpoint, "--port", "0", "--gallery", str(tmp_path), "--json") as process:
        address = json.loads(process.stdout.readline())["address"]
        base, _, query = address.partition("/?")
        token = urllib.parse.parse_qs(query)["token"][0]
        assert len(token) >= 32
        with urllib.request.urlopen(address, timeout=30) as page:
            assert b"js/main.js" in page.read()
        request = urllib.request.Request(f"{base}/api/session", json.dumps({"token": token}).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            cookie = answer.headers["Set-Cookie"].partition(";")[0]
        request = urllib.request.Request(f"{base}/api/doctor", headers={"Cookie": cookie})
        with urllib.request.urlopen(request, timeout=60) as answer:
            checks = [finding["check"] for finding in json.load(answer)["findings"]]
        assert "inference service: connection" in checks
        assert any(check.startswith("store") for check in checks)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_a_port_that_is_taken_is_named(endpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start(endpoint, "--port", str(port)) as process:
            assert process.wait(30) == 1
            assert f"Port {port} of 127.0.0.1" in process.stderr.read()


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_is_none_is_refused(endpoint, port):
    with start(endpoint, "--port", port) as process:
        assert process.wait(30) == 2
        assert process.stdout.read() == ""


def test_the_command_says_what_is_missing():
    """Without the extra, the command says how to install it."""
    code = (
        "import sys; sys.modules['starlette'] = None; sys.modules['uvicorn'] = None\n"
        "from residuum.cli import main; sys.exit(main(['ui']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "extra 'ui'" in done.stderr
