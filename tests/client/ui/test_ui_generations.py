"""The app of `residuum ui`: generation as a stream, changes of the steering, stop, and services that are away."""

import http.client
import json
import socket
import threading
import time

import numpy as np
import pytest

pytest.importorskip("starlette")

import residuum
from residuum.directions.values import Origin
from residuum.rpc.errors import Failure, Reason
from residuum.values.selections.points import SITES
from tests.client.support.peer import HIDDEN
from tests.client.support.peer import row as peer_row
from tests.client.ui.ui_page import Page


@pytest.fixture
def page(endpoint, tmp_path):
    gallery = tmp_path / "gallery"
    gallery.mkdir()
    residuum.Directions({1: np.ones(HIDDEN), 3: 2 * np.ones(HIDDEN)}).save(gallery / "joy.safetensors")
    running = Page(endpoint, gallery)
    yield running
    running.stop()


def operation(**changes):
    return {"kind": "add", "direction": "joy", "layers": "3", "scale": 2.0, "phase": "generated", **changes}


def test_text_comes_as_a_stream(page, endpoint):
    events = page.events(
        "generate", {"prompt": "a bb ccc", "sampling": {"max_tokens": 3}, "capture": {"layers": "0-1"}}
    )
    assert [name for name, _ in events] == ["started", "token", "token", "token", "finished"]
    assert events[0][1]["prompt_tokens"] == 3
    assert [data["position"] for name, data in events if name == "token"] == [3, 4, 5]
    assert events[-1][1]["reason"] == "length"
    assert events[-1][1]["captured"] is True
    with residuum.Client(endpoint) as client:
        assert client.activations(events[0][1]["id"]).layers == (0, 1)


@pytest.mark.parametrize(
    ("changes", "kind", "numbers"),
    [
        ({}, "add", {"scale": 2.0}),
        ({"kind": "ablate", "scale": 0.5}, "ablate", {"scale": 0.5}),
        ({"kind": "cap", "min": -1, "max": 4}, "cap", {"min": -1.0, "max": 4.0}),
        ({"kind": "replace", "value": 3}, "replace", {"value": 3.0}),
    ],
)
def test_operations_reach_the_service(page, peer, changes, kind, numbers):
    page.events("generate", {"prompt": "a", "operations": [operation(**changes)], "sampling": {"max_tokens": 1}})
    (sent,) = peer.requests[-1].spec.steering.operations
    assert sent.WhichOneof("operation") == kind
    assert list(sent.layers.list.layers) == [3]
    assert {name: getattr(getattr(sent, kind), name) for name in numbers} == numbers
    assert residuum.Positions.from_proto(sent.positions) == residuum.Positions.of("generated")


def test_directions_apply_where_their_rows_are(page, peer, tmp_path):
    for site in ("resid_pre", "z", "q"):
        directions = residuum.Directions({3: np.ones(HIDDEN)}, origin=Origin(site=site))
        directions.save(tmp_path / "gallery" / f"{site}.safetensors")
    for site, layer, steered in (("resid_pre", 2, "resid_post"), ("z", 3, "z")):
        page.events("generate", {"prompt": "a", "operations": [operation(direction=site)]})
        (sent,) = peer.requests[-1].spec.steering.operations
        assert list(sent.layers.list.layers) == [layer]
        assert (sent.site or SITES["resid_post"]) == SITES[steered]
    code, error = page("generate", {"prompt": "a", "operations": [{**operation(direction="q"), "from": "3"}]})
    assert (code, "for the site q" in error["message"]) == (400, True)


def test_each_layer_has_its_own_vector_unless_one_is_chosen(page, peer):
    page.events("generate", {"prompt": "a", "operations": [operation(layers="all")]})
    (sent,) = peer.requests[-1].spec.steering.operations
    assert list(sent.layers.list.layers) == [1, 3]
    assert len(set(sent.layer_digests)) == 2
    page.events("generate", {"prompt": "a", "operations": [{**operation(layers="0-4"), "from": "1"}]})
    (sent,) = peer.requests[-1].spec.steering.operations
    assert list(sent.layers.list.layers) == [0, 1, 2, 3, 4]
    assert sent.add.digest == residuum.Vector(np.ones(HIDDEN)).digest


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 7},
        {"messages": []},
        {"messages": [{"role": "root", "content": "x"}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"prompt": "a", "sampling": []},
        {"prompt": "a", "sampling": {"max_tokens": "many"}},
        {"prompt": "a", "capture": "all"},
        {"prompt": "a", "capture": {"layers": "x"}},
        {"prompt": "a", "operations": {}},
        {"prompt": "a", "operations": [operation(kind="love")]},
        {"prompt": "a", "operations": [operation(phase="moon")]},
        {"prompt": "a", "operations": [operation(scale="2")]},
        {"prompt": "a", "operations": [operation(layers="2")]},
        {"prompt": "a", "operations": [operation(kind="replace")]},
        {"prompt": "a", "operations": [operation(kind="cap", min=None)]},
        {"prompt": "a", "operations": [{**operation(), "from": "2"}]},
        {"prompt": "a", "operations": [operation(direction="../../etc/passwd")]},
    ],
)
def test_requests_that_make_no_sense_say_why(page, body):
    code, error = page("generate", body)
    assert code == 400
    assert error["message"]


def test_an_unknown_direction_is_named(page):
    code, error = page("generate", {"prompt": "a", "operations": [operation(direction="nobody")]})
    assert code == 404
    assert "nobody" in error["message"]


class Running:
    """A generation that waits after its first token."""

    def __init__(self, page, peer):
        self.peer = peer
        peer.script.hold = threading.Event()
        self.connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        body = {"prompt": "a bb", "operations": [operation()], "sampling": {"max_tokens": 5}}
        self.connection.request("POST", "/api/generate", json.dumps(body), {"Cookie": page.cookie})
        self.response = self.connection.getresponse()
        self.id = self.event()[1]["id"]
        assert self.event()[0] == "token"

    def event(self):
        name, data, _ = (self.response.readline().decode().strip() for _ in range(3))
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_the_steering_changes_while_it_generates(page, peer):
    running = Running(page, peer)
    answer = page("steer", {"id": running.id, "operations": [operation(scale=9.0)]})
    assert answer == {"first_positions": [3]}
    assert peer.requests[-1].steering.operations[0].add.scale == 9.0
    assert page("steer", {"id": running.id, "operations": []}) == {"first_positions": [3]}
    peer.script.hold.set()
    while (event := running.event())[0] == "token":
        pass
    assert event[0] == "finished"
    assert page("steer", {"id": running.id, "operations": []})[0] == 404


def test_with_an_operators_rule_that_steers_the_steering_is_fixed(page, peer):
    body = {"prompt": "a bb", "id": "ruled", "operations": [operation()], "sampling": {"max_tokens": 2}}
    peer.script.may_rule_steer = True
    events = page.events("generate", body)
    assert [name for name, _ in events] == ["started", "token", "token", "finished"]
    assert (events[0][1]["id"], events[0][1]["updatable"]) == ("ruled", False)
    asked = [request.spec for request in peer.requests if hasattr(request, "spec")]
    assert [len(spec.steering.operations) for spec in asked[-2:]] == [1, 1]
    peer.script.may_rule_steer = False
    assert page.events("generate", {**body, "id": "free"})[0][1]["updatable"] is True


def test_other_refusals_are_the_answer(page, peer):
    peer.script.failures = [Failure(Reason.ERROR_REASON_INVALID_FIELD, "No.", field="sampling.seed")]
    assert page("generate", {"prompt": "a"})[0] == 400
    assert peer.calls.count("Generate") == 1


def test_stop_ends_the_request(page, peer):
    running = Running(page, peer)
    assert page("stop", {"id": running.id}) == {}
    peer.script.hold.set()
    name, data = running.event()
    assert (name, data["kind"]) == ("error", "RequestAborted")


def test_a_page_that_goes_away_stops_its_request(page, peer):
    running = Running(page, peer)
    running.response.close()
    running.connection.close()
    assert peer.cancelled.wait(20)


def test_a_sweep_measures_each_scale(page, peer, endpoint):
    body = {
        "prompt": "a bb ccc",
        "operation": operation(),
        "layer": 3,
        "scales": [-1, 0, 2.5],
        "sampling": {"max_tokens": 4},
    }
    events = page.events("sweep", body)
    assert sorted(data["scale"] for _, data in events) == [-1, 0, 2.5]
    sent = {len(request.spec.steering.operations) for request in peer.requests if hasattr(request, "spec")}
    assert sent == {0, 1}  # scale 0 is the unsteered reply
    wanted = np.stack([peer_row(0, 1, 3, at) for at in (3, 4, 5)]).astype(np.float64) @ np.ones(HIDDEN) / HIDDEN**0.5
    assert all(data["projection"] == pytest.approx(wanted.mean(), rel=1e-6) for _, data in events)
    assert all((data["tokens"], data["text"]) == (4, " 4 5 6 7") for _, data in events)
    with residuum.Client(endpoint) as client:
        assert list(client.captures(prefix="ui-")) == []
    for changes in ({"scales": []}, {"scales": [float("1e999")]}, {"layer": "3"}, {"operation": operation(kind="cap")}):
        assert page("sweep", {**body, **changes})[0] == 400


def test_a_sweep_measures_directions_of_heads_at_their_site(page, tmp_path):
    heads = residuum.Directions({3: np.ones(HIDDEN)}, origin=Origin(site="z"))
    heads.save(tmp_path / "gallery" / "heads.safetensors")
    body = {"prompt": "a bb ccc", "operation": operation(direction="heads"), "layer": 3, "scales": [0, 1]}
    events = page.events("sweep", {**body, "sampling": {"max_tokens": 4}})
    rows = np.stack([peer_row(0, SITES["z"], 3, at) for at in (3, 4, 5)]).astype(np.float64)
    wanted = (rows @ np.ones(HIDDEN) / HIDDEN**0.5).mean()
    assert [data["projection"] for _, data in events] == [pytest.approx(wanted, rel=1e-6)] * 2


def test_a_sweep_that_the_page_leaves_is_stopped_and_deleted(page, peer, endpoint):
    peer.script.hold = threading.Event()
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    body = {"prompt": "a", "operation": operation(), "layer": 3, "scales": [1, 2], "sampling": {"max_tokens": 4}}
    connection.request("POST", "/api/sweep", json.dumps(body), {"Cookie": page.cookie})
    response = connection.getresponse()
    assert peer.generating.wait(20)
    response.close()
    connection.close()
    assert peer.cancelled.wait(20)
    with residuum.Client(endpoint) as client:
        deadline = time.monotonic() + 20
        while list(client.captures(prefix="ui-")):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_service_that_hangs_is_reported(tmp_path, monkeypatch):
    """It accepts connections and never answers, such as a process that is stopped. Its calls may take 10 s."""
    monkeypatch.setattr("residuum.ui.api.health._WAIT_SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        running = Page(endpoint, tmp_path)
        try:
            begun = time.monotonic()
            (problem,) = running("health")["problems"]
            assert endpoint in problem
            assert time.monotonic() - begun < 9
        finally:
            running.stop()


def test_a_service_that_is_away_is_reported(tmp_path):
    running = Page("127.0.0.1:1", tmp_path)
    try:
        code, error = running("generate", {"prompt": "a"})
        assert (code, error["kind"]) == (503, "Unreachable")
        assert running("captures")[0] == 503
        health = running("health")
        assert health["inference"] == "UNREACHABLE"
        assert health["problems"]
    finally:
        running.stop()
