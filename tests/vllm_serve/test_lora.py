"""`vllm serve` with taps, LoRA adapters and two API servers.

The request's model is the adapter, and the manifest says so. Vectors and random projections work through either server.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPConnection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import openai
import psutil
import pytest

import residuum
from bench.conformance.reference import adding
from residuum.wire.rows.projection import projection_signs
from svc_common.launcher import start_store
from tests.reference.adapters import make_adapter, merge
from tests.reference.hf import Reference, relative_error
from tests.vllm_serve.serving import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bench.conformance.reference import Change
    from svc_common.launcher import Service
    from tests.vllm_serve.serving import Server

pytestmark = pytest.mark.engine

MODEL, ADAPTERS = "smollm2", ("joy", "calm")
"""The names of the served models. The first one has no adapter."""
CLOSE = 2e-4
LAYER = 1
API_SERVERS = 2


@pytest.fixture(scope="module")
def places(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, tiny_llama, seed, rank=8, alpha=8) for seed, name in enumerate(ADAPTERS)}


@pytest.fixture(scope="module")
def references(tiny_llama: Path, places: dict[str, Path]) -> dict[str, Reference]:
    found = {name: Reference(tiny_llama) for name in (MODEL, *places)}
    for name, place in places.items():
        merge(found[name].model, place)
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = start_store(tmp_path_factory.mktemp("store"))
    try:
        service.wait_until_serving(60)
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, places: dict[str, Path], store: Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    modules = [f"{name}={place}" for name, place in places.items()]
    adapters = ["--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--lora-modules", *modules]
    flags = [f"--api-server-count={API_SERVERS}", *adapters]
    folder = tmp_path_factory.mktemp("vllm")
    with running_server(folder, tiny_llama, *flags, fork=True, RESIDUUM_STORE=store.endpoint) as running:
        yield running


@pytest.fixture(scope="module")
def served(server: Server, store: Service) -> Iterator[tuple[openai.OpenAI, residuum.Client]]:
    """The OpenAI client and the client of the store."""
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as api,
        residuum.Client(store.endpoint, store=store.endpoint) as captures,
    ):
        yield api, captures


@pytest.fixture
def connections(server: Server) -> Iterator[list[HTTPConnection]]:
    """A connection to each API server. vLLM, not the caller, chooses the one that accepts a connection."""
    opened: list[HTTPConnection] = []
    found: dict[int, HTTPConnection] = {}
    try:
        while len(found) < API_SERVERS:
            assert len(opened) < 100, "one API server accepts all connections"
            opened.append(HTTPConnection(str(urlsplit(server.url).netloc), timeout=120))
            opened[-1].request("GET", "/health")
            opened[-1].getresponse().read()
            found[acceptor_of(opened[-1], server)] = opened[-1]
        yield list(found.values())
    finally:
        for connection in opened:
            connection.close()


def acceptor_of(connection: HTTPConnection, server: Server) -> int:
    """Return the process ID of the API server that accepted a connection."""
    port = connection.sock.getsockname()[1]
    (pid,) = {
        process.pid
        for process in psutil.Process(server.process.pid).children(recursive=True)
        for accepted in process.net_connections("tcp")
        if accepted.raddr and accepted.raddr.port == port
    }
    return pid


def post(connection: HTTPConnection, prompt: list[int], xargs: dict[str, object]) -> tuple[int, str]:
    """Complete a prompt through one API server, and return the answer's status and text."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "vllm_xargs": xargs}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def complete(api: openai.OpenAI, model: str, prompt: list[int], xargs: dict[str, object]) -> str:
    """Complete a prompt, and return the ID of the answer."""
    return api.completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"vllm_xargs": xargs}
    ).id


def test_requests_of_each_adapter_at_once(
    served: tuple[openai.OpenAI, residuum.Client], references: dict[str, Reference]
) -> None:
    api, captures = served
    push = np.random.default_rng(3).standard_normal(references[MODEL].model.config.hidden_size).astype(np.float32)
    steer = residuum.Add(residuum.Vector.from_array(push), layer=LAYER)
    steering: list[tuple[residuum.Add | None, dict[int, Change]]] = [(None, {}), (steer, {LAYER: adding(push)})]
    asked = [(model, *steered) for model in references for steered in steering]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [
            pool.submit(complete, api, model, [20 + number, 7, 8, 9], residuum.vllm_xargs(residuum.Capture(), steer))
            for number, (model, steer, _) in enumerate(asked)
        ]
    for (model, _, changes), answer in zip(asked, answers, strict=True):
        acts = captures.activations(answer.result())
        assert (acts.manifest.model, acts.manifest.adapter) == (MODEL, "" if model == MODEL else model)
        expected = references[model].rows(acts.token_ids.tolist(), changes)["resid_post"]
        assert relative_error(acts.stack(), expected) < CLOSE


def test_a_capture_of_another_adapter_is_not_the_answer(served: tuple[openai.OpenAI, residuum.Client]) -> None:
    api, captures = served
    xargs = residuum.vllm_xargs(residuum.Capture(), request_id="once", if_exists="skip")
    complete(api, "joy", [5, 6], xargs)
    first = captures.manifest("once", wait=30)
    complete(api, "joy", [5, 6], xargs)
    assert captures.manifest("once").open_time == first.open_time, "the capture that exists is the answer"
    for model in (MODEL, "calm"):
        with pytest.raises(openai.BadRequestError, match="its LoRA adapter differs"):
            complete(api, model, [5, 6], xargs)


@pytest.mark.parametrize("named", ["joy", ""])
def test_the_spec_may_name_the_adapter(served: tuple[openai.OpenAI, residuum.Client], named: str) -> None:
    api, captures = served
    spec = json.dumps({"model": named, "capture": {"layers": {"all": True}}})
    assert captures.manifest(complete(api, "joy", [5, 6], {"residuum": spec}), wait=30).adapter == "joy"


@pytest.mark.parametrize(("model", "named"), [("joy", "calm"), ("joy", MODEL), (MODEL, "joy")])
def test_a_spec_that_expects_another_model_is_refused(
    served: tuple[openai.OpenAI, residuum.Client], model: str, named: str
) -> None:
    spec = json.dumps({"model": named, "capture": {"layers": {"all": True}}})
    with pytest.raises(openai.BadRequestError, match=rf"UNKNOWN_MODEL: .*{model}.*{named}"):
        complete(served[0], model, [5, 6], {"residuum": spec})


def test_each_api_server_steers_by_its_own_vectors_and_by_those_of_the_others(
    served: tuple[openai.OpenAI, residuum.Client], connections: list[HTTPConnection], references: dict[str, Reference]
) -> None:
    """Many vectors at once through both servers: neither loads one into a row of the bank that the other one uses."""
    captures, reference = served[1], references[MODEL]
    source = np.random.default_rng(8)
    pushes = source.standard_normal((2, 8, reference.model.config.hidden_size)).astype(np.float32)

    def steer(server: int, *, like: int, send: bool) -> None:
        for number, push in enumerate(pushes[like]):
            xargs = residuum.vllm_xargs(
                residuum.Capture(),
                residuum.Add(residuum.Vector.from_array(push), layer=LAYER),
                request_id=f"steered-{server}-by-{like}-{number}",
                send_vectors=send,
            )
            status, text = post(connections[server], [30 + number, 7, 8], xargs)
            assert status == HTTPStatus.OK, text

    unknown = residuum.vllm_xargs(
        None, residuum.Add(residuum.Vector.from_array(2 * pushes[0, 0]), layer=LAYER), send_vectors=False
    )
    for connection in connections:
        status, text = post(connection, [5], unknown)
        assert (status, "MISSING_VECTORS" in text) == (HTTPStatus.BAD_REQUEST, True), text
    for send in (True, False):
        with ThreadPoolExecutor(API_SERVERS) as pool:
            for done in [pool.submit(steer, at, like=at if send else 1 - at, send=send) for at in range(API_SERVERS)]:
                done.result()
        for at in range(API_SERVERS):
            like = at if send else 1 - at
            for number, push in enumerate(pushes[like]):
                acts = captures.activations(f"steered-{at}-by-{like}-{number}")
                expected = reference.rows(acts.token_ids.tolist(), {LAYER: adding(push)})["resid_post"]
                assert relative_error(acts.stack(), expected) < CLOSE


def test_each_api_server_makes_random_projections(
    served: tuple[openai.OpenAI, residuum.Client], connections: list[HTTPConnection], references: dict[str, Reference]
) -> None:
    captures, reference = served[1], references[MODEL]

    def project(server: int) -> None:
        for seed in range(8):
            capture = residuum.Capture(layers=[LAYER], encoding="rp", dimensions=16, seed=10 * server + seed)
            xargs = residuum.vllm_xargs(capture, request_id=f"projected-{server}-{seed}")
            status, text = post(connections[server], [40 + seed, 7, 8], xargs)
            assert status == HTTPStatus.OK, text

    with ThreadPoolExecutor(API_SERVERS) as pool:
        list(pool.map(project, range(API_SERVERS)))
    for server in range(API_SERVERS):
        for seed in range(8):
            acts = captures.activations(f"projected-{server}-{seed}")
            rows = reference.rows(acts.token_ids.tolist())["resid_post"][LAYER]
            signs = projection_signs(10 * server + seed, rows.shape[1], 16).astype(np.float64)
            assert relative_error(acts[LAYER], rows @ signs / np.sqrt(16)) < CLOSE
