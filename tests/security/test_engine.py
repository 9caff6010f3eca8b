"""Both services with a real engine, mutual TLS and tokens, used by two tenants and an unauthorised caller."""

from __future__ import annotations

import urllib.request
from contextlib import ExitStack

import numpy as np
import pytest

import residuum
from residuum.cli import main
from svc_common.launcher import start_store
from tests import one_process
from tests.security.test_scans import KNOCKS, noise
from tests.warm_start import start_inference

pytestmark = pytest.mark.engine

START_SECONDS = 240.0
SMALL = [
    "--enforce-eager",
    "--kv-cache-gib",
    "0.25",
    "--max-num-batched-tokens",
    "128",
    "--max-num-seqs",
    "8",
    one_process.FLAG,
]


def test_two_tenants_of_one_engine(tiny_llama, tmp_path, tokens, authority, server_pair, client_pair, capsys):
    tls = residuum.TLS(ca=authority.path, cert=client_pair.cert, key=client_pair.key)
    secure = ["--tls-cert", server_pair.cert, "--tls-key", server_pair.key, "--tls-client-ca", authority.path]
    secure = [*map(str, [*secure, "--tokens", tokens.path]), "--metrics", "127.0.0.1:0"]
    own = tmp_path / "store.token"
    own.write_text(tokens.add("*", "write"))
    given = {name: tokens.add(name, "generate", "read") for name in ("alice", "bob")}
    to_store = ["--store-tls-ca", authority.path, "--store-tls-cert", client_pair.cert]
    to_store = [*map(str, [*to_store, "--store-tls-key", client_pair.key, "--store-token-file", own])]
    with ExitStack() as stack:
        store = start_store(tmp_path, secure)
        stack.callback(store.stop)
        store.wait_until_serving(60, tls)
        inference = start_inference(tmp_path, str(tiny_llama), store.endpoint, [*SMALL, *secure, *to_store])
        stack.callback(inference.stop)
        inference.wait_until_serving(START_SECONDS, tls)

        def connect(token):
            return stack.enter_context(residuum.Client(inference.endpoint, token=token, tls=tls, timeout=60))

        alice, bob = connect(given["alice"]), connect(given["bob"])
        joy = residuum.Vector.from_array(np.ones(alice.info().hidden_size, np.float32))
        capture = residuum.Capture(layers="all")
        replies = {}
        for number, client in enumerate((alice, bob)):
            steer = residuum.Add(joy, layer=0, scale=float(number))
            replies[client] = client.generate(
                f"Prompt {number}", max_tokens=4, capture=capture, request_id="same", steer=steer
            )
        rows = {client: client.activations("same", timeout=60) for client in (alice, bob)}
        assert all(acts.manifest.state == "complete" for acts in rows.values())
        assert rows[alice].token_ids.tolist() != rows[bob].token_ids.tolist()
        assert [item.capture_id for item in alice.captures()] == ["same"]
        assert alice.delete("same") > 0
        assert bob.activations("same")[0].shape == rows[bob][0].shape
        with pytest.raises(residuum.UnknownCapture):
            alice.manifest("same")
        lines = len(inference.log.read_text().splitlines())
        for _ in range(KNOCKS):  # failed handshakes leave no log lines
            noise(int(inference.endpoint.rpartition(":")[2]))
        assert len(inference.log.read_text().splitlines()) < lines + KNOCKS // 2
        with pytest.raises(residuum.Unauthenticated):
            connect("rsd_unknown").generate("Hello")
        with pytest.raises(residuum.PermissionDenied) as denied:
            connect(tokens.add("carol", "read")).generate("Hello")
        assert denied.value.right == "generate"
        flags = ["--tls-ca", str(authority.path), "--client-cert", str(client_pair.cert)]
        flags += ["--client-key", str(client_pair.key), "--token-file", str(tmp_path / "bob.token")]
        (tmp_path / "bob.token").write_text(given["bob"])
        assert main(["doctor", "--endpoint", inference.endpoint, *flags]) == 0
        doctor = capsys.readouterr().out
        assert "credentials: TLS, trusting" in doctor
        figures = "".join(urllib.request.urlopen(url, timeout=10).read().decode() for url in metrics(store, inference))
        assert 'reason="UNAUTHENTICATED"' in figures
    said = doctor + figures + store.log.read_text() + inference.log.read_text()
    for secret in (own.read_text(), *given.values(), "rsd_unknown"):
        assert secret not in said


def metrics(*services):
    for service in services:
        line = next(line for line in service.log.read_text().splitlines() if '"event": "metrics"' in line)
        port = line.partition('"port": ')[2].partition(",")[0]
        yield f"http://127.0.0.1:{port}/metrics"
