"""The `residuum` command in a separate process: on a terminal, in a pipe, interrupted."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading

import pytest

import residuum
from tests.client.support.shell import command, environment


@pytest.mark.parametrize("words", [["--version"], ["info", "--json"]])
def test_the_command_runs_as_a_module(endpoint, words):
    result = subprocess.run(
        [sys.executable, "-m", "residuum", *words],
        env=environment(endpoint), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.startswith(f"residuum {residuum.__version__}\n" if words == ["--version"] else "{")


def test_interrupt_cancels_the_call(endpoint, peer):
    peer.script.hold = threading.Event()
    with subprocess.Popen(
        command("generate", "a", "--max-tokens", "100"), env=environment(endpoint), stdout=-1, stderr=-1
    ) as process:
        assert process.stdout.read(2) == b" 2"  # the first token: the call runs
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert re.fullmatch(rb"residuum: interrupted\. The request req-[0-9a-f]+ was aborted\.\n", err)
    assert peer.cancelled.wait(10)


def test_an_error_is_not_glued_to_a_part_of_a_reply(endpoint, peer):
    peer.script.hold = threading.Event()
    result = subprocess.run(
        command("generate", "a", "--timeout", "1"),
        env=environment(endpoint), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    text, error = result.stdout.splitlines()
    assert text == " 2"
    assert error.startswith("residuum: ")


def test_a_closed_pipe_causes_no_error_output(endpoint, captured):
    script = " ".join(["exec", *map(_quoted, command("ls"))])
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"({script}) | head -c 1 >/dev/null"],
        env=environment(endpoint), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stderr == ""


def _quoted(word):
    import shlex

    return shlex.quote(word)


def test_tables_and_bars_on_a_terminal(endpoint, captured, tmp_path):
    for arguments, expected in (
        (["ls", "--prefix", captured], b"capture_id"),
        (["info"], b"num_layers"),
        (["pull", captured, "--out", str(tmp_path / "x")], b"reading"),
    ):
        assert expected in _on_a_terminal(command(*arguments), environment(endpoint)), arguments


@pytest.mark.parametrize("columns", [50, 80, 100])
def test_ids_stay_whole_on_a_narrow_terminal(endpoint, columns):
    with residuum.Client(endpoint) as client:
        name = client.generate("a", max_tokens=2, capture=residuum.Capture(layers=[0])).request_id
        client.manifest(name, wait=True)
    shown = _on_a_terminal(command("ls", "--prefix", name), {**environment(endpoint), "COLUMNS": str(columns)})
    assert name.encode() in shown
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= columns
    assert [word in lines[0] for word in ("age", "num_rows", "model")] == [columns >= 80] * 3


def _on_a_terminal(words, env):
    main_end, its_end = pty.openpty()
    process = subprocess.Popen(words, env={**env, "TERM": "xterm"}, stdin=its_end, stdout=its_end, stderr=its_end)
    os.close(its_end)
    shown = b""
    while True:
        try:
            part = os.read(main_end, 4096)
        except OSError:  # Linux reports a closed other end like this
            part = b""
        if not part:
            break
        shown += part
    os.close(main_end)
    assert process.wait(30) == 0, shown
    return shown
