"""The `residuum` command: its output in a pipe and for programs, and its exit codes."""

from __future__ import annotations

import argparse
import json
import re
import threading

import numpy as np
import pytest

import residuum
from residuum.cli import main
from residuum.cli.main import make_parser as parser
from residuum.transport.progress import size
from tests.client.support.peer import HIDDEN, LAYERS


def test_info(cli):
    code, out, _ = cli("info")
    assert code == 0
    facts = dict(line.split("\t") for line in out.splitlines())
    assert (facts["model"], facts["num_layers"], facts["eager"]) == ("peer", str(LAYERS), "no")
    assert json.loads(cli("info", "--json")[1])["hidden_size"] == HIDDEN


def test_info_shows_device_memory(cli, monkeypatch):
    limits = json.loads(cli("info", "--json")[1])["limits"]
    assert (limits["capture_pool_bytes"], limits["ring_bytes"], limits["table_bytes"]) == (3 << 30, 1 << 28, 5 << 20)
    assert f"table_bytes {5 << 20}" in cli("info")[1]
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "capture_pool_bytes 3.0 GiB, ring_bytes 256.0 MiB, table_bytes 5.0 MiB" in cli("info")[1]


def test_stats(cli, captured, store, monkeypatch):
    code, out, _ = cli("stats")
    assert code == 0
    facts = dict(line.split("\t") for line in out.splitlines())
    assert (facts["endpoint"], facts["max_bytes"], facts["retain_bytes"]) == (store.endpoint, str(64 << 20), "")
    assert "complete " in facts["captures"]
    found = json.loads(cli("stats", "--json")[1])
    assert found["captures"]["complete"] >= 1
    assert (found["retain_seconds"], found["expired_by_age"], found["expired_by_size"]) == (None, 0, 0)
    assert 0 < found["used_bytes"] <= found["disk_bytes"] < found["free_disk_bytes"]
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "64.0 MiB" in cli("stats")[1]


def test_list(cli, captured):
    code, out, _ = cli("ls", "--prefix", captured, "--state", "complete")
    assert code == 0
    assert out.split("\t")[:3] == [captured, "complete", "12"]
    assert json.loads(cli("ls", "--json", "-n", 1)[1])["state"]
    assert out.endswith(" UTC\n")
    assert cli("ls", "--prefix", "nothing-like-it") == (0, "", "no captures match\n")
    assert cli("ls", "--prefix", "nothing-like-it", "--json") == (0, "", "")


def test_a_label_stays_on_its_line(cli, captured, endpoint):
    shown = 'note = "1\\t2\\n3\\x1b[2J"'
    assert cli("label", captured, "note=1\t2\n3\x1b[2J") == (0, f"{captured}: {shown}\n", "")
    assert cli("ls", "--prefix", captured)[1].split("\t")[5] == shown
    assert json.loads(cli("ls", "--prefix", captured, "--json")[1])["labels"] == {"note": "1\t2\n3\x1b[2J"}


def test_a_sequence_beyond_the_limit_is_refused(cli, captured):
    code, _, err = cli("follow", captured, "--sequence", 1 << 40)
    assert (code, "The sequence 1099511627776 does not exist" in err) == (1, True)


def test_the_help_shows_an_endpoint_with_a_zone(monkeypatch, capsys):
    monkeypatch.setenv("RESIDUUM_ENDPOINT", "[fe80::1%eth0]:50051")
    for command in ("info", "extract"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "[fe80::1%eth0]:50051" in "".join(capsys.readouterr().out.split())


def test_pull(cli, captured, tmp_path):
    path = tmp_path / "x.safetensors"
    code, out, _ = cli("pull", captured, "--out", path)
    assert code == 0
    assert "2 layers × 6 positions × 8" in out
    assert residuum.Activations.from_safetensors(path).layers == (1, 4)
    _, out, _ = cli("pull", captured, "--out", path, "--layers", "4", "--json", "--force")
    assert json.loads(out)["shape"] == [1, 6, HIDDEN]


def test_pull_writes_only_the_selected_sites(cli, endpoint, tmp_path):
    path = tmp_path / "x.safetensors"
    with residuum.Client(endpoint) as client:
        capture = residuum.Capture(layers=[1], sites="resid_post,resid_pre")
        name = client.generate("a bb", max_tokens=3, capture=capture).request_id
    for wanted, there in (("resid_pre", ["resid_pre"]), ("all", ["resid_post", "resid_pre"])):
        code, out, _ = cli("pull", name, "--out", path, "--sites", wanted, "--json", "--force")
        assert (code, json.loads(out)["sites"]) == (0, there)
        assert residuum.Activations.from_safetensors(path).sites == tuple(there)
    code, _, err = cli("pull", name, "--out", path, "--sites", "resid_post,mlp_out", "--force")
    assert code == 1
    assert "no site mlp_out. Choose among its sites: resid_post, resid_pre." in err


def test_pull_and_follow_only_the_selected_positions(cli, captured, tmp_path):
    flags = ["--positions", "-2:", "--json"]
    code, out, _ = cli("pull", captured, "--out", tmp_path / "x.npz", *flags)
    assert (code, json.loads(out)["shape"]) == (0, [2, 5, HIDDEN])
    code, out, _ = cli("follow", captured, *flags)
    assert code == 0
    assert {at for line in out.splitlines() for at in json.loads(line)["positions"]} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_pull_says_which_captures_it_left_out(cli, peer, endpoint, tmp_path, flags):
    peer.script.lost_layers = (1,)
    with residuum.Client(endpoint) as client:
        name = client.generate("a bb", max_tokens=3, capture=residuum.Capture(layers=[0, 1])).request_id
        client.manifest(name, wait=True)
    code, out, err = cli("pull", "--prefix", name, "--out", tmp_path, *flags)
    assert (code, out) == (0, "")
    assert f"{name} is incomplete and was left out; --allow-partial writes its present rows" in err
    assert cli("pull", "--prefix", name, "--out", tmp_path, "--allow-partial", *flags)[0] == 0
    code, out, err = cli("pull", "--prefix", name, "--out", tmp_path, "--allow-partial", *flags)
    assert (code, out) == (0, "")
    assert "skipped 1 of 1 captures because of existing files" in err


def test_pull_of_an_incomplete_capture_needs_partial(cli, peer, endpoint, tmp_path):
    peer.script.lost_layers = (1,)
    with residuum.Client(endpoint) as client:
        name = client.generate("a bb", max_tokens=3, capture=residuum.Capture(layers=[0, 1])).request_id
    path = tmp_path / "x.safetensors"
    code, _, err = cli("pull", name, "--out", path)
    assert code == 1
    assert "OVERFLOW" in err
    assert not path.exists()
    assert cli("pull", name, "--out", path, "--allow-partial")[0] == 0


def test_follow_of_an_incomplete_capture_needs_partial(cli, peer, endpoint):
    peer.script.lost_layers = (1,)
    with residuum.Client(endpoint) as client:
        name = client.generate("a bb", max_tokens=3, capture=residuum.Capture(layers=[0, 1])).request_id
    code, _, err = cli("follow", name)
    assert code == 1
    assert "--allow-partial" in err
    code, out, err = cli("follow", name, "--allow-partial")
    assert (code, err) == (0, "")
    assert out.endswith(f"{name}: incomplete\n")


def test_pull_of_an_unknown_capture_fails(cli, tmp_path):
    code, out, err = cli("pull", "never-was", "--out", tmp_path / "x")
    assert (code, out) == (1, "")
    assert "never-was" in err


def test_pull_errors_name_command_line_flags(cli, peer, endpoint, tmp_path):
    peer.script.lost_layers = (1,)
    with residuum.Client(endpoint) as client:
        name = client.generate("a bb", max_tokens=3, capture=residuum.Capture(layers=[0, 1])).request_id
    _, _, err = cli("pull", name, "--out", tmp_path / "x.safetensors")
    assert "--allow-partial" in err
    assert "allow_partial" not in err


def test_pull_stops_at_its_timeout(cli, peer, endpoint, tmp_path):
    peer.script.delay_seal = threading.Event()
    with residuum.Client(endpoint) as client:
        name = client.generate("a bb", max_tokens=3, capture=residuum.Capture(layers=[0])).request_id
    code, out, err = cli("pull", name, "--out", tmp_path / "x", "--timeout", "0.3")
    peer.script.delay_seal.set()
    assert (code, out) == (1, "")
    assert "longer --timeout" in err
    assert "still open" in err


def test_pull_without_positions_is_reported(cli, endpoint, tmp_path):
    with residuum.Client(endpoint) as client:
        name = client.generate("a bb", max_tokens=2, capture=residuum.Capture(positions=5000)).request_id
    code, _, err = cli("pull", name, "--out", tmp_path / "x")
    assert code == 0
    assert err.startswith("residuum: The capture")
    assert "0 positions" in err


def test_pull_into_a_missing_folder_fails(cli, captured, tmp_path):
    code, _, err = cli("pull", captured, "--out", tmp_path / "none" / "x.safetensors")
    assert code == 1
    assert "cannot be written" in err


def test_remove(cli, captured):
    code, out, err = cli("rm", "never-was", captured)
    assert code == 1  # one of them did not exist; the other is deleted nevertheless
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


def test_vectors_of_the_same_name_are_all_sent(endpoint, capsys, tmp_path, peer):
    expected = []
    for folder, value in (("a", 71), ("b", 72)):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "joy.npy", np.full(HIDDEN, value))
        expected.append(f"joy\t{residuum.Vector.from_array(np.full(HIDDEN, value)).hexdigest}")
    paths = [str(tmp_path / folder / "joy.npy") for folder in ("a", "b")]
    assert main(["vectors", "put", "--endpoint", endpoint, *paths]) == 0
    assert capsys.readouterr().out.splitlines() == [*expected, "2 of 2 sent, 64 B"]
    assert main(["vectors", "find", "--endpoint", endpoint, *paths]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{line}\tyes" for line in expected]
    assert (
        main(["generate", "a", "--endpoint", endpoint, "--capture", "1", "--onto", paths[0], "--onto", paths[1]]) == 0
    )
    assert len(peer.requests[-1].spec.capture.encoding_options.vectors) == 2


def test_vectors_of_another_width_are_refused(endpoint, capsys, tmp_path):
    np.save(tmp_path / "joy.npy", np.ones(HIDDEN + 3))
    assert main(["vectors", "put", "--endpoint", endpoint, str(tmp_path / "joy.npy")]) == 1
    assert "11 elements" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"no array", b"", b"\x93NUMPY\x01"])
def test_a_file_that_is_no_array_is_refused_in_plain_words(endpoint, capsys, tmp_path, content):
    (tmp_path / "joy.npy").write_bytes(content)
    assert main(["vectors", "put", "--endpoint", endpoint, str(tmp_path / "joy.npy")]) == 1
    assert capsys.readouterr().err == (
        "residuum: joy.npy is not a .npy file of numbers. Write it with numpy.save, from an array of numbers.\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["pull"], ["rm"], ["vectors"], ["generate"], ["ls", "--state", "done"], ["info", "-x"],
     ["ls", "-n", "-1"], ["ls", "-n", "0"], ["info", "--timeout", "0"], ["info", "--timeout", "soon"],
     ["generate", "a", "--positions", "prompt"], ["generate", "a", "--sites", "resid_pre"],
     ["generate", "a", "--before-steering"], ["generate", "a", "--encoding", "zip"], ["pull", "a", "--out", "a.foo"],
     ["rm", "a", "--prefix", "b"], ["generate", "a", "--file", "b"],
     ["generate", "--file", "b", "--id", "c", "--if-exists", "skip"]],
)  # fmt: skip
def test_wrong_command_lines_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error, advice = capsys.readouterr().err.splitlines()
    assert error.startswith("residuum")
    assert re.fullmatch(r"See residuum.* --help\.", advice)


def _options(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)
        else:
            yield parser.prog, action


def test_every_option_has_help_with_its_default():
    seen = 0
    for command_name, action in _options(parser()):
        where = f"{command_name} {action.option_strings or action.dest}"
        assert action.help, where
        if (action.option_strings and action.nargs != 0) or isinstance(action, argparse._StoreTrueAction):
            assert "default: " in action.help, where
            seen += 1
    assert seen > 30


def test_nothing_listens(cli):
    code, out, err = cli("info", at="127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "127.0.0.1:1" in err
    assert cli("info", at="nonsense")[0] == 1


def test_an_empty_endpoint_is_refused_with_a_flag(cli):
    assert cli("ls", at="")[2].endswith("or only a store, with --store.\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--add", "nope.npy@1"), "nope.npy does not exist."),
        (("--add", "none/nope.npy@1"), "The folder none does not exist."),
        (("--json-schema", "folder"), "folder is a folder, not a file."),
        (("--json-schema", "latin"), "--json-schema latin is not UTF-8: byte 0 is 0xe9."),
        (("--json-schema", "file/schema.json"), "file/schema.json cannot be used: Not a directory."),
    ],
)
def test_files_that_cannot_be_read_are_named_in_words(cli, tmp_path, monkeypatch, flags, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "latin").write_bytes(b"\xe9 ")
    assert cli("generate", "a", *flags) == (1, "", f"residuum: {told}\n")


def test_sizes():
    assert [size(count) for count in (0, 1023, 1536, 3 << 20, 5 << 30, 7 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "7.0 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--serve", "model"], "--serve needs --ray"),
        (["--ray", "local", "--pack"], "--pack cannot be used with --ray"),
        (["--ray", "local", "--dtype", "float32"], "--dtype cannot be used with --ray"),
        (["--ray", "local", "--serve", "model", "--endpoint", "a:1"], "--endpoint names others"),
        (["--ray", "local", "--services", "2"], "--services needs --serve"),
        (["--services", "2"], "--services needs --serve"),
        (["--ray", "local", "--gpus", "0"], "--gpus needs --serve"),
        (["--ray", "local", "--python", "python"], "--python needs --serve"),
        (["--ray", "local", "--serve", "model", "--services", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_flags_of_jobs_with_ray_that_do_not_fit(capsys, tmp_path, flags, what):
    with pytest.raises(SystemExit) as caught:
        main(["extract", "in.jsonl", "--output", str(tmp_path / "rows"), "--capture", "1", *flags])
    assert caught.value.code == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--token-file", "--tls-ca", "--tls-server-name", "--client-cert", "--client-key"])
def test_empty_credentials_are_refused(cli, capsys, flag):
    """An unset variable of a shell gives them. Without the CA, the client would connect in plain text."""
    with pytest.raises(SystemExit) as caught:
        cli("ls", flag, "")
    assert caught.value.code == 2
    assert f"argument {flag}: the value is empty" in capsys.readouterr().err
