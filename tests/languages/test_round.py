"""A request and its capture in each language, with real services. Every row equals the Python client's, to the byte.

The services run SmolLM2 with two stores, mutual TLS and tokens, as in production. This is the hardest case for a client
in another language.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import residuum
from residuum.wire.placement import ranks
from svc_common.launcher import start_inference, start_store
from tests.languages.programs import Outcome
from tests.security.certificates import Authority
from tests.security.tokens import Tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

START_SECONDS = 240.0
STORES = ("alpha", "beta")
SMALL = ["--enforce-eager", "--kv-cache-gib", "0.25", "--max-model-len", "512", "--max-num-seqs", "8"]


@pytest.fixture(scope="module")
def services(smollm2, tmp_path_factory):
    """(environment for programs, Python client) of running services."""
    folder = tmp_path_factory.mktemp("services")
    authority = Authority(folder / "ca")
    server, caller = authority.issue("server"), authority.issue("caller", names=())
    tokens = Tokens(folder / "tokens.toml")
    token = tokens.add("alice", "generate", "read")
    own = folder / "store.token"
    own.write_text(tokens.add("*", "write"))
    secure = ["--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", authority.path]
    secure = [str(item) for item in (*secure, "--tokens", tokens.path)]
    to_store = ["--store-tls-ca", authority.path, "--store-tls-cert", caller.cert, "--store-tls-key", caller.key]
    to_store = [str(item) for item in (*to_store, "--store-token-file", own)]
    tls = residuum.TLS(ca=authority.path, cert=caller.cert, key=caller.key)
    with ExitStack() as stack:
        stores = []
        for name in STORES:
            store = start_store(folder / name, secure)
            stack.callback(store.stop)
            store.wait_until_serving(60, tls)
            stores.append(f"{name}={store.endpoint}")
        inference = start_inference(folder, str(smollm2), ",".join(stores), [*SMALL, *secure, *to_store])
        stack.callback(inference.stop)
        inference.wait_until_serving(START_SECONDS, tls)
        client = stack.enter_context(residuum.Client(inference.endpoint, token=token, tls=tls, timeout=120))
        environment = {
            "RESIDUUM_ENDPOINT": inference.endpoint,
            "RESIDUUM_TOKEN": token,
            "RESIDUUM_TLS_CA": str(authority.path),
            "RESIDUUM_CLIENT_CERT": str(caller.cert),
            "RESIDUUM_CLIENT_KEY": str(caller.key),
        }
        yield environment, client


@pytest.fixture
def vector(services, program, request, tmp_path):
    """A vector that no other test sends, and its file."""
    width = services[1].info().hidden_size
    seed = zlib.crc32(request.node.name.encode())
    made = residuum.Vector.from_array(np.random.default_rng(seed).normal(size=width).astype(np.float32))
    path = tmp_path / "vector.f32"
    path.write_bytes(made.values.astype("<f4").tobytes())
    return made, path


@pytest.mark.parametrize("encoding", ["raw", "fp32", "fp16", "bf16"])
def test_every_row_equals_that_of_the_python_client(services, program, vector, encoding, tmp_path, count):
    environment, client = services
    steering, path = vector
    assert client.find_missing_vectors([steering])

    outcome = Outcome.of(program.round(path, tmp_path / "out", encoding, **environment), tmp_path / "out")

    said = outcome.summary
    assert (said["digest"], said["vectors_sent"]) == (steering.digest.hex(), 1)
    assert client.find_missing_vectors([steering]) == [], "the server has the vector under this digest"

    acts = client.activations(said["request_id"])
    rows = acts.stack()
    assert (said["layers"], said["positions"]) == (list(acts.layers), acts.positions.tolist())
    assert said["width"] == acts.width == rows.shape[2]
    assert outcome.rows == rows.astype("<f4").tobytes()
    assert outcome.followed == outcome.rows

    manifest = acts.manifest
    assert said["state"] == "CAPTURE_STATE_COMPLETE"
    assert said["prompt_token_ids"] == list(manifest.prompt_token_ids)
    assert said["generated_token_ids"] == list(manifest.sequences[0].generated_token_ids)
    assert said["rows_before_end"] > 0, "a follower has rows while the model still generates"

    assert said["asked"] == ranks(STORES, said["request_id"])[:1], "the first store that is asked has the capture"
    assert said["store"] == said["asked"][0]
    count.update(captures=1, rows=outcome.num_rows)


def test_the_same_request_from_python_gives_the_same_tokens_and_rows(services, program, vector, tmp_path):
    environment, client = services
    steering, path = vector
    outcome = Outcome.of(program.round(path, tmp_path / "out", **environment), tmp_path / "out")
    said = outcome.summary
    middle, _ = said["layers"]

    def again(**steer):
        capture = residuum.Capture(layers=said["layers"])
        reply = client.generate(
            said["prompt_token_ids"],
            max_tokens=len(said["generated_token_ids"]),
            temperature=0.0,
            ignore_eos=True,
            capture=capture,
            **steer,
        )
        return reply, client.activations(reply.request_id).stack()

    reply, rows = again(steer=residuum.Add(steering, layer=middle, scale=4.0))
    assert list(reply.token_ids) == said["generated_token_ids"]
    assert reply.text == said["text"]
    assert np.array_equal(rows, outcome.array)
    _, unsteered = again()
    assert not np.array_equal(unsteered[:, 0], outcome.array[:, 0]), "the steering has an effect"


def test_a_refused_request_is_reported_with_its_reason(services, program, vector, tmp_path, count):
    environment, _ = services
    done = program.round(vector[1], tmp_path / "out", **environment | {"RESIDUUM_TOKEN": "rsd_unknown"})
    assert done.returncode == 1
    assert "UNAUTHENTICATED" in done.stderr
    assert "token" in done.stderr, "the server's own message"
    assert not (tmp_path / "out").exists()
    count.update(refusals=1)


def test_a_refused_vector_is_reported_with_its_reason(services, program, tmp_path, count):
    environment, client = services
    values = np.zeros(client.info().hidden_size, np.float32)
    values[1] = np.nan
    (tmp_path / "vector.f32").write_bytes(values.tobytes())
    done = program.round(tmp_path / "vector.f32", tmp_path / "out", **environment)
    assert done.returncode == 1
    assert "BAD_VALUES" in done.stderr
    count.update(refusals=1)


def test_a_certificate_of_another_authority_is_not_trusted(services, program, vector, tmp_path, count):
    environment, _ = services
    stranger = Authority(tmp_path / "stranger", "stranger")
    done = program.round(vector[1], tmp_path / "out", **environment | {"RESIDUUM_TLS_CA": str(stranger.path)})
    assert done.returncode == 1
    assert done.stderr.strip()
    count.update(refusals=1)


def test_buf_curl_calls_by_reflection(services):
    environment, client = services
    command = [
        str(Path(sys.executable).parent / "buf"),
        "curl",
        "--protocol",
        "grpc",
        "--cacert",
        environment["RESIDUUM_TLS_CA"],
    ]
    command += ["--cert", environment["RESIDUUM_CLIENT_CERT"], "--key", environment["RESIDUUM_CLIENT_KEY"]]
    bearer = f"authorization: Bearer {environment['RESIDUUM_TOKEN']}"
    command += ["--header", bearer, "--reflect-header", bearer]
    url = f"https://{environment['RESIDUUM_ENDPOINT']}/residuum.v1.InferenceService/GetModelInfo"
    done = subprocess.run([*command, url], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hiddenSize"] == client.info().hidden_size


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed; Debian 12 has no package of it")
def test_grpcurl_calls_by_reflection(services):
    environment, client = services
    command = ["grpcurl", "-cacert", environment["RESIDUUM_TLS_CA"], "-cert", environment["RESIDUUM_CLIENT_CERT"]]
    command += ["-key", environment["RESIDUUM_CLIENT_KEY"]]
    command += ["-H", f"authorization: Bearer {environment['RESIDUUM_TOKEN']}"]
    command += [environment["RESIDUUM_ENDPOINT"], "residuum.v1.InferenceService/GetModelInfo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["hiddenSize"] == client.info().hidden_size
