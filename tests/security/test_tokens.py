"""The tokens file, and the command that makes its entries."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from pathlib import Path

import pytest

import residuum
from residuum.cli import main
from residuum.cli.services import doctor
from residuum.wire.tokens import make_token, token_hash
from svc_common.security.tokens_file import Limits, TokenFile, TokensError, tomllib
from tests.client.support.peer import RunningPeer
from tests.security.callers import Caller

HASH = "sha256:" + "0" * 64


def ask(endpoint, token):
    with residuum.Client("localhost:1", store=endpoint, token=token, timeout=20) as client:
        return client.stats()


BAD = {
    "no TOML": ("[[token", "is not TOML"),
    "the token instead of its hash": (
        '[[token]]\nhash = "rsd_SECRET"\ntenant = "a"\nrights = ["read"]',
        "token.1.hash: String should match",
    ),
    "no tenant": (f'[[token]]\nhash = "{HASH}"\nrights = ["read"]', "token.1.tenant: Field required"),
    "a bad tenant": (f'[[token]]\nhash = "{HASH}"\ntenant = "a/SECRET"\nrights = ["read"]', "a tenant's name must"),
    "no rights": (f'[[token]]\nhash = "{HASH}"\ntenant = "a"\nrights = []', "token.1.rights"),
    "an unknown right": (f'[[token]]\nhash = "{HASH}"\ntenant = "a"\nrights = ["SECRET"]', "token.1.rights"),
    "any tenant, to read": (f'[[token]]\nhash = "{HASH}"\ntenant = "*"\nrights = ["read"]', r"tenant '\*' may have"),
    "a time of nowhere": (
        f'[[token]]\nhash = "{HASH}"\ntenant = "a"\nrights = ["read"]\nexpires = 2030-01-01T00:00:00',
        "token.1.expires: Input should have timezone info",
    ),
    "twice": (
        f'[[token]]\nhash = "{HASH}"\ntenant = "a"\nrights = ["read"]\n' * 2,
        "token 2 repeats the hash of an earlier token",
    ),
    "an unknown key": (
        f'[[token]]\nhash = "{HASH}"\ntenant = "a"\nrights = ["read"]\nright = "SECRET"',
        "token.1.right",
    ),
    "an unknown limit": ("[tenant.a]\nbytes = 1", "tenant.a.bytes: Extra inputs are not permitted"),
    "a bad limit": ('[tenant.a]\nmax_bytes = "many"', "tenant.a.max_bytes"),
    "a negative limit": ("[tenant.a]\nmax_open_captures = -1", "tenant.a.max_open_captures"),
    "too large a limit": ('[tenant.a]\nmax_bytes = "8EiB"', "tenant.a.max_bytes: Input should be less than"),
    "too many captures": (f"[tenant.a]\nmax_open_captures = {1 << 63}", "tenant.a.max_open_captures"),
    "limits of nobody": ('[tenant."a/b"]\nmax_bytes = 1', "is not a valid tenant name"),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_a_bad_tokens_file_is_reported_at_startup(store, tokens, text, words):
    tokens.replace(text)
    with pytest.raises(TokensError, match=words) as raised, store(tokens=tokens.path):
        pass
    assert "SECRET" not in str(raised.value)


def test_a_missing_tokens_file_is_reported(store, tmp_path):
    with pytest.raises(TokensError, match="cannot be read"), store(tokens=tmp_path / "none"):
        pass


def test_limits(tokens):
    tokens.limit(
        "alice", max_bytes="1MiB", max_open_captures=3, max_vector_bytes=4096, max_requests=5, max_sae_bytes="2KiB"
    )
    table = TokenFile(tokens.path).table()
    assert table.limits_of("alice") == Limits(1 << 20, 3, 4096, 5, 2048)
    assert table.limits_of("bob") == Limits()


def test_tokens_can_be_added_and_removed_while_the_service_runs(store, tokens, capfd):
    first = tokens.add("alice", "read")
    with store(tokens=tokens.path) as endpoint:
        assert ask(endpoint, first)
        second = tokens.add("alice", "read")
        assert ask(endpoint, second)
        tokens.replace("[[token")
        assert ask(endpoint, first)  # an unusable file changes nothing
        entry = f'[[token]]\nhash = "{token_hash(second)}"\ntenant = "alice"\nrights = ["read"]\n'
        tokens.replace(entry)
        assert ask(endpoint, second)
        with pytest.raises(residuum.Unauthenticated, match="This service does not know the token"):
            ask(endpoint, first)
        tokens.replace("")
        with pytest.raises(residuum.Unauthenticated):
            ask(endpoint, second)


def test_a_file_that_could_not_be_read_is_read_once_its_permissions_allow_it(tokens, monkeypatch):
    removed, kept = tokens.add("alice", "read"), tokens.add("alice", "read")
    file = TokenFile(tokens.path)
    tokens.replace(f'[[token]]\nhash = "{token_hash(kept)}"\ntenant = "alice"\nrights = ["read"]\n')

    def refused(*_args, **_options):
        raise PermissionError

    with monkeypatch.context() as patch:  # the tests may run as root, whom no permissions stop
        patch.setattr(Path, "read_text", refused)
        assert file.table().find(removed), "the service keeps the old contents"
    before = tokens.path.stat().st_ctime_ns
    while tokens.path.stat().st_ctime_ns == before:
        tokens.path.chmod(0o640)
    assert not file.table().find(removed)
    assert file.table().find(kept)


def test_a_removed_token_is_unknown_once_the_file_can_be_read(tokens, monkeypatch, capfd):
    """A process with too many open files cannot read it. Nothing of the file changes when it can again."""
    removed, kept = tokens.add("alice", "read"), tokens.add("alice", "read")
    file = TokenFile(tokens.path)
    tokens.replace(f'[[token]]\nhash = "{token_hash(kept)}"\ntenant = "alice"\nrights = ["read"]\n')

    def refused(*_args, **_options):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refused)
        assert file.table().find(removed), "the service keeps the old contents"
        assert file.table().find(removed)
    assert capfd.readouterr().out.count("Too many open files") == 1, "one line says it"
    assert not file.table().find(removed)
    assert file.table().find(kept)


def test_a_token_is_known_while_its_file_is_overwritten(tokens):
    """As `cp` does: it empties the file, and then writes it."""
    token = tokens.add("alice", "read")
    text, file = tokens.path.read_text(), TokenFile(tokens.path)
    tokens.path.write_text("")
    writing = threading.Timer(0.02, tokens.path.write_text, [text])
    writing.start()
    assert file.table().find(token)
    writing.join()
    assert file.table().find(token)
    tokens.path.write_text("")
    assert not file.table().find(token), "an empty file is a file without tokens"


def test_a_client_reads_its_file_again(store, tokens, tmp_path):
    old, new = tokens.add("alice", "read"), tokens.add("alice", "read")
    file = tmp_path / "token"
    file.write_text(f"{old}\n")
    with store(tokens=tokens.path) as endpoint, residuum.Client("localhost:1", store=endpoint, token=file) as client:
        assert client.stats()
        text = tokens.path.read_text().replace(token_hash(old), HASH)
        tokens.replace(text)
        with pytest.raises(residuum.Unauthenticated):
            client.stats()
        file.write_text(new)
        assert client.stats()


@pytest.mark.parametrize("gap", ["empty", "missing", "in another encoding"])
def test_a_client_keeps_its_token_while_its_file_is_overwritten(store, tokens, tmp_path, gap):
    old, new = tokens.add("alice", "read"), tokens.add("alice", "read")
    file = tmp_path / "token"
    file.write_text(old)
    with store(tokens=tokens.path) as endpoint, residuum.Client("localhost:1", store=endpoint, token=file) as client:
        assert client.stats()
        if gap == "missing":
            file.unlink()
        else:
            file.write_bytes(b"" if gap == "empty" else b"\xff\xfe")
        assert client.stats()
        file.write_text(new)
        tokens.replace(tokens.path.read_text().replace(token_hash(old), HASH))
        assert client.stats()


@pytest.mark.parametrize("way", ["environment", "file in the environment", "flag"])
def test_the_command_finds_the_token(store, tokens, tmp_path, monkeypatch, capsys, way):
    token = tokens.add("alice", "read")
    file = tmp_path / "token"
    file.write_text(token)
    flags = ["--token-file", str(file)] if way == "flag" else []
    if way == "environment":
        monkeypatch.setenv("RESIDUUM_TOKEN", token)
    elif not flags:
        monkeypatch.setenv("RESIDUUM_TOKEN_FILE", str(file))
    with store(tokens=tokens.path) as endpoint:
        assert main(["stats", "--endpoint", "localhost:1", "--store", endpoint, *flags]) == 0
        monkeypatch.delenv("RESIDUUM_TOKEN", raising=False)
        monkeypatch.delenv("RESIDUUM_TOKEN_FILE", raising=False)
        capsys.readouterr()
        assert main(["stats", "--endpoint", "localhost:1", "--store", endpoint]) == 1
    assert "This service requires a token" in capsys.readouterr().err


def test_figures_of_the_whole_store_are_for_admins(store, tokens, capsys, monkeypatch):
    alice, admin = tokens.add("alice", "read"), tokens.add("root", "admin")
    monkeypatch.setenv("RESIDUUM_TOKEN", alice)
    with store(tokens=tokens.path) as endpoint:
        for stores in (endpoint, f"a={endpoint},b={endpoint.replace('127.0.0.1', 'localhost')}"):
            assert main(["stats", "--endpoint", "localhost:1", "--store", stores]) == 0
            out = capsys.readouterr().out
            assert "num_bytes\t0" in out
            assert not {"max_bytes", "used_bytes", "retain_bytes"} & {line.split("\t")[0] for line in out.splitlines()}
        monkeypatch.setenv("RESIDUUM_TOKEN", admin)
        assert main(["stats", "--endpoint", "localhost:1", "--store", endpoint]) == 0
    assert f"max_bytes\t{64 << 30}" in capsys.readouterr().out


def test_an_admins_list_shows_the_tenant_of_each_capture(store, tokens, capsys, monkeypatch):
    writer, admin = tokens.add("*", "write"), tokens.add("root", "admin")
    monkeypatch.setenv("RESIDUUM_TOKEN", admin)
    with store(tokens=tokens.path) as endpoint:
        caller = Caller(endpoint, writer)
        for tenant in ("alice", "bob"):
            caller.open("same", tenant)
        caller.channel.close()
        capsys.readouterr()  # the store's log
        command = ["ls", "--endpoint", "localhost:1", "--store", endpoint]
        assert main(command) == 0
        assert sorted(line.split("\t")[-1] for line in capsys.readouterr().out.splitlines()) == ["alice", "bob"]
        assert main([*command, "--tenant", "bob"]) == 0
        assert "bob" not in capsys.readouterr().out


def test_two_tokens_in_the_environment_are_refused(monkeypatch):
    monkeypatch.setenv("RESIDUUM_TOKEN", "a")
    monkeypatch.setenv("RESIDUUM_TOKEN_FILE", "b")
    with pytest.raises(residuum.BadCredentials, match="both set"):
        residuum.Client("localhost:1")


def test_the_command_makes_a_token(store, tokens, capsys):
    flags = ["--tenant", "alice", "--rights", "generate,read", "--name", 'Alice\'s "laptop"\n', "--days", "1"]
    assert main(["token", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    token = next(line for line in lines if line.startswith("rsd_"))
    entry = "\n".join(lines[lines.index("[[token]]") :])
    assert token not in entry
    tokens.append(entry)
    with store(tokens=tokens.path) as endpoint:
        assert ask(endpoint, token)


@pytest.mark.parametrize("name", ["\U0001f600", "\x7f", "José \\ \t", 'a"""b'])
def test_any_note_leaves_the_file_readable(store, tokens, capsys, name):
    flags = ["--tenant", "alice", "--rights", "read", "--name", name, "--append", str(tokens.path)]
    assert main(["token", *flags]) == 0
    token = capsys.readouterr().out.strip()
    assert tomllib.loads(tokens.path.read_text(encoding="utf-8"))["token"][0]["name"] == name
    with store(tokens=tokens.path) as endpoint:
        assert ask(endpoint, token)


def test_the_command_adds_it_to_the_file(store, tokens, capsys):
    assert main(["token", "--tenant", "*", "--rights", "write", "--append", str(tokens.path)]) == 0
    token = capsys.readouterr().out.strip()
    assert main(["token", "--tenant", "a", "--rights", "read", "--append", str(tokens.path), "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["token"]
    assert token not in tokens.path.read_text()
    with store(tokens=tokens.path) as endpoint:
        assert ask(endpoint, token)
        assert ask(endpoint, other)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tenant", "a/b", "--rights", "read"],
        ["--tenant", "a", "--rights", "everything"],
        ["--tenant", "*", "--rights", "read"],
        ["--tenant", "a", "--rights", "read", "--days", "0"],
        ["--tenant", "a", "--rights", "read", "--days", "many"],
        ["--tenant", "a", "--rights", "read", "--name", "\udcff"],
    ],
)
def test_invalid_command_lines_of_the_token_command_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["token", *flags])
    assert raised.value.code == 2
    assert "rsd_" not in "".join(capsys.readouterr())


def test_tokens_differ_and_their_hash_does_not():
    assert make_token() != make_token()
    # Other languages can compute the hash: it is the SHA-256 of the token's ASCII bytes.
    assert token_hash("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def diagnose(inference, store, token):
    """Return what `doctor` finds about the services' tokens."""
    with residuum.Client(inference, store=store, token=token, timeout=20) as client:
        found = doctor.examine(client, named_store=True)
        return [(finding.ok, finding.warning, finding.detail) for finding in found if "tokens" in finding.check]


async def test_the_doctor_notices_that_only_the_inference_service_requires_tokens(inference, store, tokens):
    token = tokens.add("alice", "generate", "read")
    service = await inference(tokens=tokens.path)
    with store() as endpoint:
        for given in (token, None):
            ((ok, warning, detail),) = await asyncio.to_thread(diagnose, service, endpoint, given)
            assert (ok, warning) == (True, True)
            assert "the inference service requires a token, but this store does not" in detail
            assert "Start it with the inference service's --tokens" in detail


async def test_the_doctor_is_silent_about_tokens_if_both_services_require_them(inference, store, tokens):
    token = tokens.add("alice", "generate", "read")
    service = await inference(tokens=tokens.path)
    with store(tokens=tokens.path) as endpoint:
        assert await asyncio.to_thread(diagnose, service, endpoint, token) == []


def test_the_doctor_notices_that_only_the_store_requires_tokens(store, tokens):
    token = tokens.add("alice", "generate", "read")
    with store(tokens=tokens.path) as endpoint:
        peer = RunningPeer(None)
        try:
            for given in (token, None):
                ((ok, warning, detail),) = diagnose(peer.endpoint, endpoint, given)
                assert (ok, warning) == (True, True)
                assert "this store requires a token, but the inference service does not" in detail
                assert "Start the inference service with this store's --tokens" in detail
            with store(path=tokens.path.with_name("other")) as other:
                assert diagnose(peer.endpoint, other, None) == []
        finally:
            peer.stop()
