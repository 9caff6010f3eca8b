"""TLS and mutual TLS: which callers connect, and which errors the others get."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import residuum
from residuum.cli import main
from residuum.cli.services import doctor
from store_svc.settings import StoreSettings
from svc_common.security.tls import SecurityError
from tests.security.certificates import Authority

ROOT = Path(__file__).parents[2]


def stats_sync(endpoint, **options):
    with residuum.Client("localhost:1", store=endpoint, timeout=20, **options) as client:
        return client.stats()


def stats_async(endpoint, **options):
    async def ask():
        async with residuum.AsyncClient("localhost:1", store=endpoint, timeout=20, **options) as client:
            return await client.stats()

    return asyncio.run(ask())


@pytest.fixture(params=[stats_sync, stats_async], ids=["sync", "async"])
def stats(request):
    return request.param


def test_a_client_that_trusts_the_ca_gets_through(store, stats, authority, server_pair):
    with store(tls_cert=server_pair.cert, tls_key=server_pair.key) as endpoint:
        assert stats(endpoint, tls=residuum.TLS(ca=authority.path))[0].num_bytes == 0


def test_a_client_with_a_certificate_connects_with_mutual_tls(store, stats, authority, server_pair, client_pair):
    tls = residuum.TLS(ca=authority.path, cert=client_pair.cert, key=client_pair.key)
    with store(tls_cert=server_pair.cert, tls_key=server_pair.key, tls_client_ca=authority.path) as endpoint:
        assert stats(endpoint, tls=tls)[0].num_bytes == 0


def test_credentials_in_the_environment(store, stats, authority, server_pair, client_pair, monkeypatch):
    monkeypatch.setenv("RESIDUUM_TLS_CA", str(authority.path))
    monkeypatch.setenv("RESIDUUM_CLIENT_CERT", str(client_pair.cert))
    monkeypatch.setenv("RESIDUUM_CLIENT_KEY", str(client_pair.key))
    with store(tls_cert=server_pair.cert, tls_key=server_pair.key, tls_client_ca=authority.path) as endpoint:
        assert stats(endpoint)[0].num_bytes == 0
        with pytest.raises(residuum.Unreachable):
            stats(endpoint, tls=False)  # an argument overrides the environment


def test_the_command_line(store, authority, server_pair, client_pair, capsys):
    flags = ["--tls-ca", str(authority.path), "--client-cert", str(client_pair.cert)]
    flags += ["--client-key", str(client_pair.key)]
    with store(tls_cert=server_pair.cert, tls_key=server_pair.key, tls_client_ca=authority.path) as endpoint:
        assert main(["stats", "--endpoint", "localhost:1", "--store", endpoint, *flags]) == 0
        assert main(["health", "--endpoint", endpoint, *flags]) == 0
        assert main(["health", "--endpoint", endpoint, "--service", "store", *flags]) == 0
        assert main(["health", "--endpoint", endpoint, "--service", "inference", *flags]) == 1
        assert main(["health", "--endpoint", endpoint]) == 1
    assert "SERVING" in capsys.readouterr().out


def test_no_token_is_sent_with_health_checks(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RESIDUUM_TOKEN", "secret-of-mine")
    with store() as endpoint:
        assert main(["health", "--endpoint", endpoint]) == 0
    assert (
        main(["health", "--endpoint", "192.0.2.1:1", "--timeout", "0.2"]) == 1
    )  # not refused, because no token is sent
    assert "UNREACHABLE" in capsys.readouterr().out


REFUSALS = {
    "another CA": ("server", "stranger", "No CA that this client trusts has signed"),
    "an expired certificate": ("expired", "authority", "has expired. The service"),
    "another name": ("elsewhere", "authority", "is for another name"),
    "no TLS at the server": (None, "authority", "does not speak TLS"),
    "no TLS at the client": ("server", None, "It may require TLS"),
}


@pytest.mark.parametrize(("server", "trusted", "words"), REFUSALS.values(), ids=REFUSALS)
def test_connection_errors_say_what_is_wrong(store, stats, authority, stranger, server_pair, server, trusted, words):
    pairs = {
        "server": lambda: server_pair,
        "expired": lambda: authority.issue("expired", days=-1),
        "elsewhere": lambda: authority.issue("elsewhere", names=("elsewhere.example",)),
    }
    pair = pairs[server]() if server else None
    settings = {"tls_cert": pair.cert, "tls_key": pair.key} if pair else {}
    tls = residuum.TLS(ca={"authority": authority, "stranger": stranger}[trusted].path) if trusted else None
    with store(**settings) as endpoint, pytest.raises(residuum.Unreachable, match=words) as raised:
        stats(endpoint, tls=tls)
    assert endpoint in str(raised.value)


def test_the_name_in_the_certificate_can_be_set(store, stats, authority):
    pair = authority.issue("by-name", names=("store.example",))
    with store(tls_cert=pair.cert, tls_key=pair.key) as endpoint:
        assert stats(endpoint, tls=residuum.TLS(ca=authority.path, server_name="store.example"))


@pytest.mark.parametrize("whose", ["nobody's", "a stranger's"])
def test_a_client_certificate_is_required(store, stats, authority, stranger, server_pair, whose):
    pair = stranger.issue("intruder", names=())
    shown = {"cert": pair.cert, "key": pair.key} if whose == "a stranger's" else {}
    settings = {"tls_cert": server_pair.cert, "tls_key": server_pair.key, "tls_client_ca": authority.path}
    told = pytest.raises(residuum.Unreachable, match="or a client certificate that it trusts")
    with store(**settings) as endpoint, told:
        stats(endpoint, tls=residuum.TLS(ca=authority.path, **shown))


def test_certificates_are_renewed_while_the_service_runs(store, tmp_path, authority, server_pair):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    old = authority.issue("soon-expired", days=-1)
    tls = residuum.TLS(ca=authority.path)
    shutil.copy(old.key, key)
    shutil.copy(old.cert, cert)
    with store(tls_cert=cert, tls_key=key) as endpoint:
        with pytest.raises(residuum.Unreachable, match="has expired"):
            stats_sync(endpoint, tls=tls)
        key.write_text("in the middle of being replaced")
        with pytest.raises(residuum.Unreachable, match="has expired"):
            stats_sync(endpoint, tls=tls)  # the service keeps its certificate
        shutil.copy(server_pair.key, key)
        shutil.copy(server_pair.cert, cert)
        assert stats_sync(endpoint, tls=tls)


def test_certificates_are_renewed_once_they_can_be_read(store, tmp_path, authority, server_pair, monkeypatch):
    """A process with too many open files cannot read them. Nothing of the files changes when it can again."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    old = authority.issue("soon-expired-too", days=-1)
    shutil.copy(old.key, key)
    shutil.copy(old.cert, cert)
    tls = residuum.TLS(ca=authority.path)

    def refused(*_args, **_options):
        raise SecurityError("Too many open files")

    with store(tls_cert=cert, tls_key=key) as endpoint:
        shutil.copy(server_pair.key, key)
        shutil.copy(server_pair.cert, cert)
        with monkeypatch.context() as patch:
            patch.setattr("svc_common.security.tls._Certificates._load", refused)
            with pytest.raises(residuum.Unreachable, match="has expired"):
                stats_sync(endpoint, tls=tls)
        assert stats_sync(endpoint, tls=tls)


def test_unusable_files_are_reported_at_startup(store, tmp_path, authority, server_pair, client_pair):
    text = tmp_path / "text"
    text.write_text("no PEM")
    bad = [
        {"tls_cert": server_pair.cert, "tls_key": client_pair.key},
        {"tls_cert": text, "tls_key": server_pair.key},
        {"tls_cert": tmp_path / "nothing", "tls_key": server_pair.key},
        {"tls_cert": server_pair.cert, "tls_key": server_pair.key, "tls_client_ca": text},
    ]
    for settings in bad:
        with pytest.raises(SecurityError, match="tls"), store(**settings):
            pass
    with store():  # this works only if the database was closed each time
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls": residuum.TLS(ca="/nowhere/ca.pem")}, "/nowhere/ca.pem cannot be read"),
        ({"tls": residuum.TLS(ca=__file__)}, "is not a PEM file"),
        ({"token": Path("/nowhere/token")}, "/nowhere/token cannot be read"),
        ({"token": "two words"}, "must be one word"),
        ({"token": "\u00e9"}, "must be one word"),
        ({"tls": residuum.TLS(cert="client.pem")}, "both cert and key"),
        ({"tls": residuum.TLS(key="client.key")}, "both cert and key"),
    ],
)
def test_bad_credentials_are_reported_before_anything_is_sent(options, words):
    with pytest.raises(residuum.BadCredentials, match=words):
        residuum.Client("localhost:1", **options)
    with pytest.raises(residuum.BadCredentials, match=words):
        residuum.AsyncClient("localhost:1", **options)


@pytest.mark.parametrize("endpoint", ["example.com:50051", "10.0.0.1:50051", "[2001:db8::1]:50051", "localhost.com:1"])
def test_a_token_is_not_sent_in_plain_text_to_another_machine(endpoint, authority):
    with pytest.raises(residuum.BadCredentials, match="in plain text") as raised:
        residuum.Client(endpoint, token="secret-of-mine")
    assert "secret-of-mine" not in str(raised.value)
    client = residuum.Client("localhost:1", store=endpoint, token="secret-of-mine")
    with pytest.raises(residuum.BadCredentials, match="in plain text"):
        client.stats()  # also at the address that the inference service advertises
    residuum.Client(endpoint, token="t", insecure=True).close()
    residuum.Client(endpoint, token="t", tls=residuum.TLS(ca=authority.path)).close()


@pytest.mark.parametrize("endpoint", ["localhost:1", "127.0.0.1:1", "127.1.2.3:1", "[::1]:1"])
def test_on_this_machine_a_token_is_sent_in_plain_text(endpoint):
    residuum.Client(endpoint, token="t").close()


def test_a_token_is_in_no_repr():
    client = residuum.Client("localhost:1", token="secret-of-mine")
    assert "secret-of-mine" not in repr(client.credentials) + repr(vars(client))


@pytest.mark.parametrize(
    ("endpoint", "options", "warning", "words"),
    [
        ("localhost:1", {}, False, "plain text, with no token"),
        ("localhost:1", {"token": "t"}, False, "plain text, with a token"),
        ("192.0.2.1:1", {}, True, "can read all traffic; --tls-ca encrypts it"),
        ("192.0.2.1:1", {"token": "t", "insecure": True}, True, "can read the token and all traffic"),
        ("192.0.2.1:1", {"token": "t", "tls": True}, False, "TLS, trusting public CAs, with a token"),
    ],
)
def test_the_doctor_reports_how_connections_are_secured(endpoint, options, warning, words):
    with residuum.Client(endpoint, **options) as client:
        (finding,) = doctor._credentials(client)
    assert (finding.ok, finding.warning) == (True, warning)
    assert words in finding.detail


def start(*flags):
    command = [sys.executable, "-m", "store_svc", "--path", "/nowhere/at/all", *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "store.example:0"])
def test_beyond_loopback_a_service_requires_tls_and_authentication(address, server_pair):
    result = start("--listen", address)
    assert result.returncode == 1
    assert "can be reached from other machines" in result.stderr
    assert "--tls-cert" in result.stderr
    assert "--insecure" in result.stderr
    result = start("--listen", address, "--tls-cert", str(server_pair.cert), "--tls-key", str(server_pair.key))
    assert result.returncode == 1
    assert "does not authenticate callers" in result.stderr


def test_a_published_port_needs_the_same_security_as_a_listening_address(server_pair, tokens, tmp_path):
    refused = start("--listen", "0.0.0.0:0", "--published-on", "0.0.0.0")
    assert refused.returncode == 1
    assert "0.0.0.0, where the port is published, can be reached from other machines" in refused.stderr
    assert "publish it on 127.0.0.1" in refused.stderr
    assert "--insecure (with compose.yaml: RESIDUUM_BIND_INSECURE=true)" in refused.stderr
    everywhere = {"path": tmp_path, "listen": "0.0.0.0:0", "published_on": "0.0.0.0"}
    for enough in (
        {"tls_cert": server_pair.cert, "tls_key": server_pair.key, "tokens": tokens.path},
        {"insecure": True},
        {"published_on": "127.0.0.1"},
        {"published_on": "[::1]"},
    ):
        StoreSettings(**everywhere | enough)


def test_a_port_published_beyond_loopback_needs_security_even_if_the_service_listens_on_loopback():
    refused = start("--listen", "127.0.0.1:0", "--published-on", "192.0.2.1")
    assert refused.returncode == 1
    assert "192.0.2.1, where the port is published, can be reached from other machines" in refused.stderr


def test_a_port_published_on_loopback_causes_no_warning(store, capfd):
    with store(listen="0.0.0.0:0", published_on="127.0.0.1") as endpoint:
        assert stats_sync(endpoint)
    assert "every process on this machine" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-client-ca", "a.pem"], "--tls-client-ca requires TLS"),
    ],
)
def test_contradictory_settings_are_refused(flags, words):
    result = start(*flags)
    assert result.returncode == 1
    assert words in result.stderr


def test_with_insecure_a_service_listens_everywhere(store, capfd):
    with store(listen="0.0.0.0:0", insecure=True) as endpoint:
        assert stats_sync(endpoint)
    assert "every caller that reaches 0.0.0.0:0" in "".join(capfd.readouterr())


def test_without_tokens_every_certificate_has_all_rights_and_a_warning_is_logged(
    store, tokens, authority, server_pair, client_pair, capfd
):
    tls = residuum.TLS(ca=authority.path, cert=client_pair.cert, key=client_pair.key)
    mutual = {"tls_cert": server_pair.cert, "tls_key": server_pair.key, "tls_client_ca": authority.path}

    def rights(endpoint, **options):
        with residuum.Client("localhost:1", store=endpoint, timeout=20, tls=tls, **options) as client:
            (stats,) = client.stats()
            return [finding.detail for finding in doctor._rights(client.credentials, stats)]

    with store(**mutual) as endpoint:
        assert "everyone with a certificate that it accepts has all rights" in rights(endpoint)[0]
    assert "callers have all rights, for all tenants" in "".join(capfd.readouterr())
    token = tokens.add("alice", "read")
    with store(**mutual, tokens=tokens.path) as endpoint:
        with pytest.raises(residuum.Unauthenticated):  # a certificate does not replace a token
            rights(endpoint)
        assert rights(endpoint, token=token) == []
    assert "callers have all rights" not in "".join(capfd.readouterr())


def test_the_test_authorities_differ(authority, stranger):
    assert authority.path.read_bytes() != stranger.path.read_bytes()
    assert isinstance(authority, Authority)
