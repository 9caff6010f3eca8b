"""The `residuum` command in a separate process: on a terminal, in a pipe, interrupted."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

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


@pytest.mark.parametrize("words", [["ls"], ["info", "--json"], ["info"], ["--help"]])
@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_closed_pipe_causes_no_error_output(endpoint, captured, words, is_buffered):
    script = " ".join(["exec", *map(_quoted, command(*words))])
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"({script}) | true"],
        env={**environment(endpoint), "PYTHONUNBUFFERED": "" if is_buffered else "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("words", [["ls"], ["info"], ["info", "--json"], ["--help"]])
def test_a_full_disk_is_one_line_and_exit_code_1(endpoint, captured, words):
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            command(*words), env={**environment(endpoint), "PYTHONUNBUFFERED": ""},
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (result.returncode, result.stderr) == (1, "residuum: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), ("2>&-", 1)])
def test_closed_streams_are_no_failures_and_errors_never_go_to_stdout(endpoint, closed, code):
    script = " ".join(map(_quoted, command("info", "--json", *(["--tenant", "a/b"] if code else []))))
    result = subprocess.run(
        ["bash", "-c", f"{script} {closed}"], env=environment(endpoint), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_characters_that_the_encoding_lacks_are_escaped(endpoint, captured, tmp_path, flags):
    path = os.fsencode(tmp_path) + "/\u0142\U0001f600".encode() + b"\xff.npz"
    result = subprocess.run(
        [*command("pull", captured, *flags, "--out"), path],
        env={**environment(endpoint), "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, Path(os.fsdecode(path)).exists()) == (0, True)
    if flags:
        assert os.fsencode(json.loads(result.stdout)["path"]) == path
    else:
        assert "\\u0142\\U0001f600\\udcff.npz: " in result.stdout


def test_ctrl_d_deletes_nothing(endpoint, captured):
    main_end, its_end = pty.openpty()
    os.write(main_end, b"\x04")
    result = subprocess.run(
        command("rm", "--prefix", captured), env=environment(endpoint), stdin=its_end, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    os.close(main_end)
    os.close(its_end)
    assert (result.returncode, result.stdout) == (1, "")
    question, error = result.stderr.splitlines()
    assert question.startswith("Delete 1 captures, ")
    assert error == "residuum: nothing was deleted; pass --yes to delete without being asked"


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
