"""The `residuum` command: what it prints in a pipe, on a terminal and for programs, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from peer import HIDDEN, LAYERS
from safetensors.numpy import save_file

import residuum
from residuum.cli import main
from residuum.cli.commands import parse_layers
from residuum.cli.output import size
from residuum.rpc.errors import Failure, Reason

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cli(endpoint, capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments, at=endpoint):
        code = main([arguments[0], "--endpoint", at, *map(str, arguments[1:])])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def captured(endpoint):
    with residuum.Client(endpoint) as client:
        reply = client.generate("a bb ccc", max_tokens=4, capture=residuum.Capture(layers=[1, 4]))
        client.manifest(reply.request_id, wait=True)
        return reply.request_id


def environment(endpoint):
    return {**os.environ, "PYTHONPATH": str(ROOT / "client"), "RESIDUUM_ENDPOINT": endpoint, "COLUMNS": "120"}


def command(*arguments):
    return [sys.executable, "-c", "import sys; from residuum.cli import main; sys.exit(main())", *arguments]


def test_info(cli):
    code, out, _ = cli("info")
    assert code == 0
    facts = dict(line.split("\t") for line in out.splitlines())
    assert (facts["model"], facts["num_layers"], facts["eager"]) == ("peer", str(LAYERS), "no")
    assert json.loads(cli("info", "--json")[1])["hidden_size"] == HIDDEN


def test_generate(cli):
    assert cli("generate", "a bb", "--max-tokens", 3)[:2] == (0, " 3 4 5\n")
    code, out, _ = cli("generate", "a bb", "--max-tokens", 2, "--json", "--id", "by-hand")
    reply = json.loads(out)
    assert code == 0
    assert (reply["request_id"], reply["text"], reply["usage"]["generated_tokens"]) == ("by-hand", " 3 4", 2)


def test_generate_from_standard_input(cli, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("a bb ccc"))
    assert cli("generate", "-", "--max-tokens", 1)[1] == " 4\n"
    assert cli("generate", "four", "--chat", "--max-tokens", 1)[1] == " 5\n"


def test_generate_captures_and_steers(cli, peer, tmp_path):
    np.save(tmp_path / "joy.npy", np.ones(HIDDEN))
    save_file({"a": np.ones(HIDDEN, np.float32), "b": np.ones(HIDDEN, np.float32)}, tmp_path / "v.safetensors")
    code, out, err = cli(
        "generate", "a bb", "--max-tokens", 2, "--capture", "0,2-4", "--positions", "prompt", "--stop", "x",
        "--add", f"{tmp_path / 'joy.npy'}@1*2.5", "--ablate", f"{tmp_path / 'v.safetensors'}:b@all",
    )  # fmt: skip
    assert (code, out) == (0, " 3 4\n")
    assert "residuum pull req-" in err
    sent = peer.requests[-1]
    assert list(sent.spec.capture.layers.list.layers) == [0, 2, 3, 4]
    assert [operation.WhichOneof("operation") for operation in sent.spec.steering.operations] == ["add", "ablate"]
    assert sent.spec.steering.operations[0].add.scale == 2.5


@pytest.mark.parametrize(
    "steer", ["joy.npy", "none.npy@1", "v.safetensors@1", "v.safetensors:c@1", "joy.npy@x", "joy.npy@1*much"]
)
def test_steering_that_cannot_be_meant(cli, tmp_path, monkeypatch, steer):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    save_file({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, "v.safetensors")
    code, out, err = cli("generate", "a", "--add", steer)
    assert (code, out) == (1, "")
    assert err.startswith("residuum: ")
    assert err.count("\n") == 1


def test_list(cli, captured):
    code, out, _ = cli("ls", "--prefix", captured, "--state", "complete")
    assert code == 0
    assert out.split("\t")[:3] == [captured, "complete", "12"]
    assert json.loads(cli("ls", "--json", "-n", 1)[1])["state"]
    assert cli("ls", "--prefix", "nothing-like-it")[:2] == (0, "")


def test_pull(cli, captured, tmp_path):
    path = tmp_path / "x.safetensors"
    code, out, _ = cli("pull", captured, "--out", path)
    assert code == 0
    assert "2 layers × 6 positions × 8" in out
    assert residuum.Activations.from_safetensors(path).layers == (1, 4)
    _, out, _ = cli("pull", captured, "--out", path, "--layers", "4", "--json")
    assert json.loads(out)["shape"] == [1, 6, HIDDEN]


def test_pull_of_an_incomplete_capture(cli, peer, endpoint, tmp_path):
    peer.script.lost_layers = (1,)
    with residuum.Client(endpoint) as client:
        name = client.generate("a bb", max_tokens=3, capture=residuum.Capture(layers=[0, 1])).request_id
    path = tmp_path / "x.safetensors"
    code, _, err = cli("pull", name, "--out", path)
    assert code == 1
    assert "OVERFLOW" in err
    assert not path.exists()
    assert cli("pull", name, "--out", path, "--allow-partial")[0] == 0


def test_pull_of_nothing(cli, tmp_path):
    code, out, err = cli("pull", "never-was", "--out", tmp_path / "x")
    assert (code, out) == (1, "")
    assert "never-was" in err


def test_pull_into_no_folder(cli, captured, tmp_path):
    code, _, err = cli("pull", captured, "--out", tmp_path / "none" / "x.safetensors")
    assert code == 1
    assert "cannot be written" in err


def test_remove(cli, captured):
    code, out, err = cli("rm", "never-was", captured)
    assert code == 1  # one of them was not there; the other is gone all the same
    assert captured in out
    assert "never-was" in err
    assert cli("ls", "--prefix", captured)[1] == ""


def test_vectors(endpoint, capsys, tmp_path, peer):
    path = tmp_path / "joy.npy"
    np.save(path, np.arange(HIDDEN))
    digest = residuum.Vector.from_array(np.arange(HIDDEN)).hexdigest

    def run(*arguments):
        return main(["vectors", *arguments, "--endpoint", endpoint, str(path)]), capsys.readouterr().out

    assert run("find") == (1, f"joy\t{digest}\tno\n")
    assert run("put") == (0, f"joy\t{digest}\n1 of 1 sent, 32 B\n")
    assert run("find") == (0, f"joy\t{digest}\tyes\n")
    _, out = run("put", "--json")
    assert json.loads(out) == {"vectors": [{"name": "joy", "digest": digest}], "sent": 0, "bytes_sent": 0}


def test_vectors_that_do_not_fit(endpoint, capsys, tmp_path):
    np.save(tmp_path / "joy.npy", np.ones(HIDDEN + 3))
    assert main(["vectors", "put", "--endpoint", endpoint, str(tmp_path / "joy.npy")]) == 1
    assert "11 elements" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["pull"], ["rm"], ["vectors"], ["generate"], ["ls", "--state", "done"], ["info", "-x"]],
)
def test_wrong_command_lines(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: residuum" in capsys.readouterr().err


def test_nothing_listens(cli):
    code, out, err = cli("info", at="127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "127.0.0.1:1" in err
    assert cli("info", at="nonsense")[0] == 1


# --------------------------------------------------------------------------------------------------------------- doctor


def findings(out):
    return {line["check"]: line["ok"] for line in map(json.loads, out.splitlines())}


def test_doctor_finds_all_well(cli, store):
    code, out, _ = cli("doctor", "--json")
    assert code == 0
    assert findings(out) == {
        "inference service: connection": True,
        "inference service: health": True,
        "model": True,
        "versions": True,
        "store: connection": True,
        f"store {store.endpoint}: health": True,
        "store answers": True,
    }
    assert cli("doctor")[1].count("ok  ") == 7


def test_doctor_names_what_is_away(cli, peer):
    code, out, _ = cli("doctor", at="127.0.0.1:1")
    assert code == 1
    assert "FAIL  inference service: connection: 127.0.0.1:1" in out
    assert "FAIL  inference service: address" in cli("doctor", at="no-such-host.invalid:1")[1]
    peer.script.store_endpoints = ["127.0.0.1:1"]
    code, out, _ = cli("doctor")
    assert code == 1
    assert "FAIL  store: connection: 127.0.0.1:1" in out
    peer.script.store_endpoints = []
    assert "FAIL  store: The inference service" in cli("doctor")[1]


def test_doctor_sees_a_service_that_loads(cli, peer, running_peer):
    running_peer.health.set("", 2)
    peer.script.failures = [Failure(Reason.ERROR_REASON_NOT_SERVING, "Loading.")] * 99
    code, out, _ = cli("doctor", "--json")
    running_peer.health.set("", 1)
    assert code == 1
    assert findings(out)["inference service: health"] is False


def test_doctor_sees_that_something_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        closer = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)], daemon=True)
        closer.start()
        result = subprocess.run(
            command("doctor", "--json", "--endpoint", f"127.0.0.1:{server.getsockname()[1]}", "--timeout", "1"),
            capture_output=True, text=True, env=environment(""), check=False, timeout=60,
        )  # fmt: skip
    assert result.returncode == 1
    assert findings(result.stdout)["inference service: health"] is False


def test_doctor_suspects_an_address_of_the_other_machines_own():
    from residuum.cli.doctor import _hint

    assert "--store" in _hint("127.0.0.1:50052", "gpu-host:50051")
    assert _hint("127.0.0.1:50052", "localhost:50051") == ""
    assert _hint("gpu-host:50052", "gpu-host:50051") == ""


# ---------------------------------------------------------------------------------------------- as a process of its own


def test_interrupt_cancels_the_call(endpoint, peer):
    peer.script.hold = threading.Event()
    with subprocess.Popen(
        command("generate", "a", "--max-tokens", "100"), env=environment(endpoint), stdout=-1, stderr=-1
    ) as process:
        assert process.stdout.read(2) == b" 2"  # the first token: the call runs
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b"residuum: interrupted\n"
    assert peer.cancelled.wait(10)


def test_a_reader_that_had_enough(endpoint, captured):
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


def _on_a_terminal(words, env):
    main_end, its_end = pty.openpty()
    process = subprocess.Popen(words, env={**env, "TERM": "xterm"}, stdin=its_end, stdout=its_end, stderr=its_end)
    os.close(its_end)
    shown = b""
    while True:
        try:
            part = os.read(main_end, 4096)
        except OSError:  # Linux's way to say that the other end was closed
            part = b""
        if not part:
            break
        shown += part
    os.close(main_end)
    assert process.wait(30) == 0, shown
    return shown


@pytest.mark.parametrize(
    ("text", "layers"), [("all", "all"), ("12", [12]), ("0,5,10-12", [0, 5, 10, 11, 12]), (" 1 , 2 ", [1, 2])]
)
def test_layers_by_hand(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1,,2", "1.5"])
def test_layers_by_hand_that_cannot_be_meant(text):
    with pytest.raises(residuum.InvalidRequest):
        parse_layers(text)


def test_sizes():
    assert [size(count) for count in (0, 1023, 1536, 3 << 20, 5 << 30, 7 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "7.0 TiB",
    ]  # fmt: skip
