"""Commands that take many prompts or captures, and their messages when they are interrupted."""

from __future__ import annotations

import concurrent.futures
import io
import itertools
import json
import os
import pty
import sys
import threading
import uuid

import numpy as np
import pytest

import residuum
from residuum.v1 import capture_pb2
from residuum.values.replies.generation import Usage
from tests.client.support.peer import HIDDEN


@pytest.fixture
def captures(endpoint):
    """Three captures whose IDs share a prefix, and one other."""
    names = ["alike-0", "alike-1", "alike-2", "other-0"]
    with residuum.Client(endpoint) as client:
        for name in names:
            client.generate("a bb ccc", request_id=name, max_tokens=2, capture=residuum.Capture(layers=[1, 4]))
            client.manifest(name, wait=True)
        yield names
        for summary in client.captures():
            if summary.capture_id in names:
                client.delete(summary.capture_id)


def listed(cli, *flags):
    return {line.split("\t")[0] for line in cli("ls", *flags)[1].splitlines()}


def test_rm_by_prefix_deletes_only_with_yes(cli, captures, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # not a terminal, so the command cannot ask
    code, _, err = cli("rm", "--prefix", "alike-")
    assert (code, listed(cli, "--prefix", "alike-")) == (1, {"alike-0", "alike-1", "alike-2"})
    assert "pass --yes" in err
    code, out, _ = cli("rm", "--prefix", "alike-", "--state", "complete", "--yes")
    assert code == 0
    assert out.startswith("deleted 3 captures, ")
    assert listed(cli, "--prefix", "alike-") == set()
    assert "other-0" in listed(cli)
    assert cli("rm", "--prefix", "alike-", "--yes") == (0, "", "no captures match\n")


def test_rm_by_labels_deletes_only_with_yes(cli, captures, endpoint, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with residuum.Client(endpoint) as client:
        client.label("alike-0", {"group": "one"})
        client.label("other-0", {"group": "one"})
    code, _, err = cli("rm", "--where", "group = one")
    assert (code, "pass --yes" in err) == (1, True)
    assert cli("rm", "--where", "group = one", "--prefix", "alike-", "--yes")[0] == 0
    assert listed(cli, "--prefix", "alike-") == {"alike-1", "alike-2"}
    assert listed(cli, "--where", "group = one") == {"other-0"}


@pytest.mark.parametrize("changes", [["y=0", "y=1"], ["y=0", "--remove", "y"]])
def test_label_refuses_two_changes_of_one_label(cli, captures, endpoint, capsys, changes):
    try:
        code, _, err = cli("label", "alike-0", *changes)
    except SystemExit as refused:
        code, err = refused.code, capsys.readouterr().err
    assert (code != 0, "the label 'y'" in err.lower()) == (True, True)
    with residuum.Client(endpoint) as client:
        assert client.manifest("alike-0").labels == {}


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("\n", 3), ("n\n", 3)])
def test_rm_by_prefix_asks_on_a_terminal(cli, captures, monkeypatch, answer, left):
    main_end, its_end = pty.openpty()
    os.write(main_end, answer.encode())
    with os.fdopen(its_end) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        code, _, err = cli("rm", "--prefix", "alike-")
    os.close(main_end)
    assert "Delete 3 captures" in err
    assert (code, len(listed(cli, "--prefix", "alike-"))) == (1 if left else 0, left)


def test_abort_stops_a_request(cli, peer, endpoint):
    peer.script.hold = threading.Event()
    with residuum.Client(endpoint) as client, client.stream("a", request_id="to-abort", max_tokens=100) as stream:
        next(stream)
        assert cli("abort", "to-abort") == (0, "to-abort: does not run any more\n", "")
        peer.script.hold.set()
        with pytest.raises(residuum.RequestAborted):
            list(stream)
    with residuum.Client(endpoint) as client:
        client.generate("a", request_id="ended", max_tokens=1)
    assert json.loads(cli("abort", "ended", "--json")[1]) == {"request_id": "ended", "running": False}
    code, out, err = cli("abort", "never-there")
    assert (code, out) == (1, "")
    assert "No such request" in err


def test_follow_prints_each_piece_once(cli, captured, endpoint):
    code, out, _ = cli("follow", captured, "--layers", "4", "--json")
    assert code == 0
    pieces = [json.loads(line) for line in out.splitlines()]
    with residuum.Client(endpoint) as client:
        acts = client.activations(captured)
    norms = {at: norm for piece in pieces for at, norm in zip(piece["positions"], piece["norms"], strict=True)}
    assert {piece["layer"] for piece in pieces} == {4}
    assert [norms[at] for at in acts.positions] == pytest.approx(list(np.linalg.norm(acts[4], axis=-1)), rel=1e-6)
    code, out, _ = cli("follow", captured, "--layers", "4")
    assert "resid_post layer 4: positions 0 to" in out
    assert out.endswith(f"{captured}: complete\n")


def test_generate_takes_a_file_of_prompts(cli, tmp_path, endpoint):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\nfour\nseven\n")
    code, out, err = cli("generate", "--file", path, "--max-tokens", 1, "--capture", "1", "--json")
    assert (code, err) == (0, "")
    replies = [json.loads(line) for line in out.splitlines()]
    with residuum.Client(endpoint) as client:
        assert [reply["text"] for reply in replies] == [
            client.generate(prompt, max_tokens=1).text for prompt in ("one", "four", "seven")
        ]
    assert [reply["prompt"] for reply in replies] == [1, 2, 3]
    assert len({reply["request_id"] for reply in replies}) == 3
    path.write_text("\n")
    assert "has no prompts" in cli("generate", "--file", path)[2]


def job(path, name, *more):
    return ("generate", "--file", path, "--id", name, "--capture", "1", "--max-tokens", 1, *more)


def test_an_id_names_the_requests_of_a_file(cli, tmp_path, peer):
    path, name = tmp_path / "prompts.txt", uuid.uuid4().hex
    path.write_text("one\nfour\n")
    code, out, err = cli(*job(path, name))
    assert (code, err) == (0, "")
    assert [line.split("]")[0] for line in out.splitlines()] == [f"[1 {name}-0", f"[2 {name}-1"]
    peer.script.skipped, name = True, uuid.uuid4().hex
    code, _, err = cli(*job(path, name, "--if-exists", "skip"))
    assert code == 0
    assert err == "nothing generated for 2 of 2 prompts: their captures exist\n"
    sent = {request.spec.request_id: request.spec.if_exists for request in peer.requests[-2:]}
    assert sent == dict.fromkeys([f"{name}-0", f"{name}-1"], capture_pb2.IF_EXISTS_SKIP)


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        (("--id", "job", "--capture", "1"), "run the same command with --if-exists skip"),
        ((), "give --capture, --id JOB and --if-exists skip"),
    ],
)
def test_an_interrupted_file_of_prompts_shows_finished_prompts_and_how_to_resume(
    cli, tmp_path, monkeypatch, more, advice
):
    usage = Usage(1, 1)
    done = residuum.Reply("job-1", (1,), (residuum.Sequence("two", (2,), "length"),), usage, captured=True)

    def interrupted(client, prompts, **arguments):
        assert prompts == ["a", "b", "c"]
        raise residuum.BatchInterrupted([None, done, None], {})

    monkeypatch.setattr(residuum.Client, "generate_many", interrupted)
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\nc\n")
    code, out, err = cli("generate", "--file", path, *more)
    assert (code, out) == (130, "[2 job-1]two\n")
    assert "interrupted. 1 of 3 prompts were done." in err
    assert advice in err


def test_lines_of_a_file_end_only_at_line_feeds(cli, peer, tmp_path):
    (tmp_path / "prompts.txt").write_bytes("\ufeffa\r\n\r\nb\u2028c\x0cd\x85e\n \nf".encode())
    peer.requests.clear()
    assert cli("generate", "--file", tmp_path / "prompts.txt", "--max-tokens", 1)[0] == 0
    assert sorted(request.text for request in peer.requests) == ["a", "b\u2028c\x0cd\x85e", "f"]


@pytest.mark.parametrize("source", ["-", "--file"])
def test_a_prompt_that_is_not_utf8_is_named(cli, tmp_path, monkeypatch, source):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"ab\xff")
    code, _, err = cli("generate", *(["-"] if source == "-" else ["--file", path]))
    assert code == 1
    assert "must be UTF-8, but byte 2 of" in err
    assert ("standard input" if source == "-" else str(path)) in err


def test_positions_take_slices(cli, peer):
    assert cli("generate", "a bb", "--capture", "0-2", "--positions", "-2:")[0] == 0
    spec = peer.requests[-1].spec.capture
    assert list(spec.layers.list.layers) == [0, 1, 2]
    assert [(item.first, item.HasField("last")) for item in spec.positions.ranges] == [(-2, False)]
    code, _, err = cli("generate", "a bb", "--capture", "0", "--positions", "first")
    assert code == 1
    assert "slices such as" in err


def test_a_wrong_choice_shows_the_choices_once(capsys):
    from residuum.cli import main

    with pytest.raises(SystemExit):
        main(["generate", "a", "--capture", "1", "--encoding", "zip"])
    err = capsys.readouterr().err
    assert "'raw', 'fp32'" in err or "raw, fp32" in err
    assert len(err.splitlines()) == 2


def test_a_timeout_names_the_request_and_how_to_resume(cli, peer):
    peer.script.hold = threading.Event()
    code, _, err = cli("generate", "a", "--id", "too-slow", "--capture", "1", "--timeout", "0.3")
    assert code == 1
    assert "The request too-slow was aborted." in err
    assert "residuum pull too-slow --allow-partial" in err


def test_help_begins_with_examples_and_ends_with_the_connection(capsys):
    from residuum.cli import main

    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = capsys.readouterr().out
    order = ["examples:", "--file", "sampling:", "capture:", "steering:", "--endpoint", "--tls-ca"]
    assert sorted(order, key=text.index) == order
    assert text.index("examples:") < 200


def test_directions_are_computed_saved_and_steer(cli, endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, prompts in (
        ("happy", "I am glad\nwhat a day\n"),
        ("sad", "I am so very sorry\nwhat a big mess that is\n"),
    ):
        (tmp_path / f"{name}.txt").write_text(prompts)
    files = ("--positive", "happy.txt", "--negative", "sad.txt", "--layers", "1,4")
    before = listed(cli)
    code, out, err = cli("directions", "joy.safetensors", *files, "--positions", "-2:")
    assert (code, err) == (0, "")
    made = residuum.Directions.load("joy.safetensors")
    assert f"joy.safetensors: {made}" in out
    assert (made.layers, made.hidden_size) == ((1, 4), HIDDEN)
    assert listed(cli) == before  # its captures are deleted
    with residuum.Client(endpoint) as client:
        sets = [
            [
                client.activations(client.generate(line, max_tokens=1, capture=residuum.Capture(layers=[1, 4])))
                for line in (tmp_path / f"{name}.txt").read_text().splitlines()
            ]
            for name in ("happy", "sad")
        ]
    expected = residuum.directions.difference_of_means(*sets, positions="-2:")
    np.testing.assert_allclose(made[4].values, expected[4].values)
    assert cli("directions", "joy.safetensors", *files)[0] == 1  # it exists
    assert cli("directions", "joy.safetensors", *files, "--method", "pca_diff", "--force")[::2] == (0, "")
    assert cli("generate", "a", "--add", "joy.safetensors@1,4*2")[::2] == (0, "")


def test_directions_find_at_once_that_they_cannot_be_written(cli, peer, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n")
    flags = ("--positive", tmp_path / "prompts.txt", "--negative", tmp_path / "prompts.txt")
    peer.requests.clear()
    code, _, err = cli("directions", tmp_path / "none" / "joy.safetensors", *flags)
    assert (code, peer.requests) == (1, [])
    assert err.endswith(f"the folder {tmp_path / 'none'} does not exist. Create it first.\n")


def test_directions_end_when_the_service_is_away(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("residuum.cli.generation.vectors._DELETE_SECONDS", 1000)
    (tmp_path / "prompts.txt").write_text("one\n")
    flags = ("--positive", tmp_path / "prompts.txt", "--negative", tmp_path / "prompts.txt", "--timeout", 0.5)
    code, _, err = cli("directions", tmp_path / "joy.safetensors", *flags, at="127.0.0.1:1")
    assert code == 1
    assert [line[:9] for line in err.splitlines()] == ["residuum:"] * 2, "a warning of the outage, and the failure"


@pytest.mark.parametrize("cause", ["an interrupt", "an error"])
def test_directions_that_do_not_end_leave_no_captures(cli, endpoint, peer, tmp_path, monkeypatch, cause):
    """One prompt fails, or still runs when Ctrl-C comes; the others are done."""
    stop, deltas, before = threading.Event(), peer._deltas, listed(cli)

    def wait(name, tokens, *arguments):
        if len(tokens) == 2:  # those of "one more"
            if cause == "an error":
                raise RuntimeError
            assert stop.wait(60)
        return deltas(name, tokens, *arguments)

    def interrupted(futures):
        yield from itertools.islice(concurrent.futures.as_completed(futures), 2)
        assert len(listed(cli) - before) >= 2
        stop.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(peer, "_deltas", wait)
    if cause == "an interrupt":
        monkeypatch.setattr("residuum._sync.batches.as_completed", interrupted)
    (tmp_path / "prompts.txt").write_text("one\none more\na third one\n")
    flags = ("--positive", tmp_path / "prompts.txt", "--negative", tmp_path / "prompts.txt")
    code, _, err = cli("directions", tmp_path / "joy.safetensors", *flags)
    assert code == (130 if cause == "an interrupt" else 1)
    assert ("Nothing was saved" if cause == "an interrupt" else "1 of 3 prompts failed") in err
    assert "--if-exists" not in err
    assert listed(cli) == before


@pytest.mark.parametrize(
    ("text", "same"),
    [("5", 5), ("-4:", slice(-4, None)), ("-4:0", range(-4, 0)), ("0:16", slice(0, 16)), ("::8", slice(None, None, 8)),
     ("0,8:16", [0, slice(8, 16)]), (" 1 , 3 ", [1, 3])],
)  # fmt: skip
def test_positions_as_text_are_those_of_python(text, same):
    assert residuum.Positions.of(text) == residuum.Positions.of(same)


@pytest.mark.parametrize("text", ["", "first", "1,,2", "1-3", "1.5", "²", "1:2:3:4", "99999999999", ":0", "0:8:0"])
def test_positions_that_are_no_positions_are_refused(text):
    with pytest.raises(residuum.InvalidRequest):
        residuum.Positions.of(text or ",")


def test_layers_as_text_are_those_of_python():
    assert residuum.Capture(layers="12-14,3") == residuum.Capture(layers=[3, 12, 13, 14])
    with pytest.raises(residuum.InvalidRequest, match="use 'all', '12'"):
        residuum.Capture(layers="twelve")
