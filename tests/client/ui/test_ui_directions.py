"""The app of `residuum ui`: the gallery of directions, new ones, searches, and health."""

import errno
import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("starlette")

import residuum
from residuum.directions.values import Origin
from residuum.ui.gallery import Gallery
from residuum.ui.separation import separations
from tests.client.support.captured import activations
from tests.client.support.peer import HIDDEN, LAYERS
from tests.client.ui.ui_page import Page


@pytest.fixture
def page(endpoint, tmp_path):
    findings = [SimpleNamespace(check="model", ok=True, detail="fine", warning=False)]
    running = Page(endpoint, tmp_path / "gallery", lambda: findings)
    yield running
    running.stop()


@pytest.fixture
def joy(page, tmp_path):
    directions = residuum.Directions({layer: np.arange(HIDDEN) + layer for layer in range(1, 4)})
    directions.save(tmp_path / "joy.safetensors")
    content = (tmp_path / "joy.safetensors").read_bytes()
    assert upload(page, content, name="joy", file="joy.safetensors")[0] == 200
    return directions


def upload(page, content, **parameters):
    import urllib.parse

    path = f"/api/direction/upload?{urllib.parse.urlencode(parameters)}"
    status, _, answer = page.raw("POST", path, content, {"Cookie": page.cookie})
    return status, json.loads(answer)


def test_files_are_uploaded_listed_renamed_and_deleted(page, joy, tmp_path):
    (entry,) = page("directions")["directions"]
    assert (entry["name"], entry["layers"], entry["hidden_size"]) == ("joy", [1, 2, 3], HIDDEN)
    assert page("direction", name="joy")["norms"] == pytest.approx([vector.norm for vector in joy.values()])
    assert upload(page, b"x", name="joy", file="joy.safetensors")[0] == 409
    assert page("direction/rename", {"name": "joy", "to": "Joy 2"}) == {}
    assert page("direction/rename", {"name": "joy", "to": "x"})[0] == 404
    assert page("direction", name="Joy 2")["layers"] == [1, 2, 3]
    assert page("direction/delete", {"name": "Joy 2"}) == {}
    assert page("directions")["directions"] == []
    assert list((tmp_path / "gallery").iterdir()) == []


@pytest.fixture(params=["links", "no links"])
def file_system(request, monkeypatch):
    """File systems with and without hard links."""

    def refused(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if request.param == "no links":
        monkeypatch.setattr(os, "link", refused)


class SavedMeanwhile:
    """Directions. While they are written, another program saves others under the same name."""

    def __init__(self, own, path, others):
        self.own, self.path, self.others = own, path, others

    def save(self, path):
        self.own.save(path)
        self.others.save(self.path)


def test_directions_that_another_program_saved_meanwhile_are_kept(file_system, tmp_path):
    gallery = Gallery(tmp_path / "gallery")
    one, two = (residuum.Directions({1: np.full(HIDDEN, value)}) for value in (1.0, 2.0))
    gallery.save("one", one, {"a": 1})
    gallery.check_new("two")
    with pytest.raises(FileExistsError, match="a direction 'two' already"):
        gallery.save("two", SavedMeanwhile(one, tmp_path / "gallery/two.safetensors", two), {"b": 2})
    with pytest.raises(FileExistsError, match="a direction 'two' already"):
        gallery.rename("one", "two")
    assert (gallery.load("one")[1], gallery.load("two")[1]) == (one[1], two[1])
    assert (gallery.notes("one"), gallery.notes("two")) == ({"a": 1}, {})
    gallery.rename("one", "three")
    assert (gallery.load("three")[1], gallery.notes("three")) == (one[1], {"a": 1})
    names = ["three.residuum.json", "three.safetensors", "two.safetensors"]
    assert sorted(path.name for path in gallery.folder.iterdir()) == names


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "a\0b", "é", "x" * 81, "-x", "a\nb", '"'])
def test_names_stay_in_the_gallery(page, joy, name, tmp_path):
    assert upload(page, b"x", name=name, file="x.npy", layer=0)[0] == 400
    assert page("direction", name=name)[0] == 400
    assert page("direction/file", name=name)[0] == 400
    assert page("direction/rename", {"name": "joy", "to": name})[0] == 400
    assert page("direction/delete", {"name": name})[0] == 400
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gallery", "joy.safetensors"]


def test_a_file_that_cannot_be_read_is_named_as_the_user_names_it(page, tmp_path):
    status, answer = upload(page, b"hello", name="junk", file="junk.safetensors")
    assert status == 400
    assert answer["error"]["message"].startswith("junk.safetensors is not a safetensors file")
    np.save(tmp_path / "nan.npy", np.full(HIDDEN, np.nan, np.float32))
    status, answer = upload(page, (tmp_path / "nan.npy").read_bytes(), name="nan", file="nan.npy", layer=1)
    assert status == 400
    assert answer["error"]["message"].startswith("nan.npy: ")


def test_a_single_vector_needs_its_layer(page, tmp_path):
    np.save(tmp_path / "v.npy", np.arange(HIDDEN, dtype=np.float32))
    content = (tmp_path / "v.npy").read_bytes()
    status, answer = upload(page, content, name="one", file="v.npy")
    assert status == 400
    assert "layer" in answer["error"]["message"]
    assert upload(page, content, name="one", file="v.npy", layer=2)[0] == 200
    assert page("direction", name="one")["layers"] == [2]


@pytest.mark.parametrize(
    ("file", "content"), [("v.npy", b"x"), ("v.safetensors", b"x" * 99), ("v.exe", b"x"), ("", b"")]
)
def test_files_that_hold_no_directions_are_refused(page, file, content):
    status, answer = upload(page, content, name="bad", file=file, layer=1)
    assert status == 400
    assert "/tmp" not in answer["error"]["message"]


def test_a_damaged_file_in_the_folder_is_listed_with_its_problem(page, joy, tmp_path):
    (tmp_path / "gallery/broken.safetensors").write_bytes(b"nothing")
    broken, good = page("directions")["directions"]
    assert broken["name"] == "broken"
    assert broken["problem"]
    assert good["name"] == "joy"


def test_files_are_exported(page, joy, tmp_path):
    pytest.importorskip("gguf")
    for form, load in (("safetensors", residuum.Directions.load), ("gguf", residuum.Directions.from_gguf)):
        status, headers, content = page.raw(
            "GET", f"/api/direction/file?name=joy&format={form}", None, {"Cookie": page.cookie}
        )
        assert status == 200
        assert headers["content-disposition"] == f'attachment; filename="joy.{form}"'
        (tmp_path / f"export.{form}").write_bytes(content)
        loaded = load(tmp_path / f"export.{form}")
        assert loaded.layers == joy.layers
        assert all(loaded[layer] == joy[layer] for layer in joy)
    assert page("direction/file", name="joy", format="exe")[0] == 400


def test_directions_are_made_from_two_lists_of_prompts(page, endpoint, tmp_path):
    body = {"name": "long", "positive": ["a bb ccc", "dd eee", "f g"], "negative": ["a", "b"]}
    events = page.events("direction/make", body)
    assert events[-1] == ("made", {"name": "long"})
    assert [data["done"] for name, data in events if name == "progress"] == [0, 1, 2, 3, 4, 5]
    made = residuum.Directions.load(tmp_path / "gallery/long.safetensors")
    # A captured row of the scripted service has its position as an element: 2, 1, 1 against 0, 0.
    assert made.layers == tuple(range(LAYERS))
    assert made[2].values.tolist() == pytest.approx([0, 0, 0, 4 / 3, 0, 0, 0, 0], abs=1e-2)
    own = tmp_path / "gallery/long.json"
    own.write_text("mine")
    notes = page("direction", name="long")["notes"]
    assert notes["separation"]["areas"] == [1.0] * LAYERS
    assert notes["prompts"]["negative"] == ["a", "b"]
    with residuum.Client(endpoint) as client:  # the examples' captures are deleted
        assert list(client.captures(prefix="ui-")) == []
    assert page("direction/make", body)[0] == 409
    page("direction/rename", {"name": "long", "to": "longer"})
    assert page("direction", name="longer")["notes"] == notes
    page("direction/delete", {"name": "longer"})
    assert list(own.parent.iterdir()) == [own]  # a file of the user stays


def test_a_direction_is_of_the_rows_that_the_form_names(page, endpoint, tmp_path):
    sides = {"positive": ["a bb ccc", "dd eee"], "negative": ["a", "b"]}
    made = {}
    for positions in ("last_prompt", "prompt"):
        body = {"name": positions, "positions": positions, **sides}
        assert page.events("direction/make", body)[-1][0] == "made"
        made[positions] = residuum.Directions.load(tmp_path / f"gallery/{positions}.safetensors")
        assert made[positions].origin.positions == positions
    means = []
    with residuum.Client(endpoint) as client:
        for side in sides.values():
            replies = client.generate_many(side, max_tokens=0, capture=residuum.Capture(positions="prompt"))
            examples = [acts[2].mean(axis=0, dtype=np.float64) for acts in client.activations(replies)]
            means.append(np.mean(examples, axis=0))
            client.delete(replies)
    assert (made["prompt"][2].values - (means[0] - means[1])).tolist() == pytest.approx([0] * HIDDEN, abs=1e-6)
    # The last position is 2, 1 against 0, 0; the mean of the positions is 1, 1 / 2 against 0, 0.
    assert made["last_prompt"][2].values[3] == pytest.approx(3 / 2)
    assert made["prompt"][2].values[3] == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    "changes",
    [{"name": "../x"}, {"positive": []}, {"positive": "a"}, {"negative": [1]}, {"method": "magic"}, {"layers": "x"}],
)
def test_lists_that_make_no_sense_are_refused(page, changes):
    code, error = page("direction/make", {"name": "n", "positive": ["a"], "negative": ["b"], **changes})
    assert code == 400
    assert error["message"]


def test_a_prompt_that_fails_is_named_without_advice_for_programs(page):
    ((name, data),) = page.events("direction/make", {"name": "n", "positive": ["a", ""], "negative": ["b"]})[-1:]
    assert name == "error"
    assert data["message"].startswith("1 of 3 prompts failed. Prompt 2: ")
    assert ".errors" not in data["message"]


def test_tokens_are_found_and_promoted(page, joy, endpoint):
    with residuum.Client(endpoint) as client:
        reply = client.generate("a bb ccc", max_tokens=3, capture=residuum.Capture(layers=[2]), request_id="searched")
        client.manifest(reply, wait=True)
        found = page("search", {"direction": "joy", "layer": 2, "k": 3, "prefix": "searched"})
        wanted = client.search(joy[2].values / joy[2].norm, layer=2, k=3, prefix="searched")
        assert [hit["score"] for hit in found["hits"]] == pytest.approx([hit.score for hit in wanted])
        assert [hit["position"] for hit in found["hits"]] == [hit.position for hit in wanted]
        later = page("search", {"direction": "joy", "layer": 2, "k": 9, "prefix": "searched", "positions": "1:"})
        assert sorted(hit["position"] for hit in later["hits"]) == [1, 2, 3, 4]
        client.delete(reply)
    assert page("search", {"direction": "joy", "layer": 5})[0] == 400
    assert page("search", {"direction": "joy", "layer": 2, "k": "x"})[0] == 400
    assert page("direction/tokens", name="joy", layer=2)["more"][:2] == ["<3>", "<4>"]


def test_directions_of_heads_are_searched_for_at_their_site_and_promote_no_tokens(page, endpoint, tmp_path):
    vector = np.random.default_rng(0).normal(size=HIDDEN)
    heads = residuum.Directions({2: vector}, origin=Origin(site="z"))
    heads.save(tmp_path / "heads.safetensors")
    assert upload(page, (tmp_path / "heads.safetensors").read_bytes(), name="heads", file="heads.safetensors")[0] == 200
    capture = residuum.Capture(layers=[2], sites=["resid_post", "z"])
    with residuum.Client(endpoint) as client:
        reply = client.generate("a bb ccc", max_tokens=3, capture=capture, request_id="heads")
        client.manifest(reply, wait=True)
        found = page("search", {"direction": "heads", "layer": 2, "prefix": "heads"})
        wanted = client.search(heads[2].values / heads[2].norm, layer=2, site="z", prefix="heads")
        assert [hit["score"] for hit in found["hits"]] == pytest.approx([hit.score for hit in wanted])
        client.delete(reply)
    code, error = page("search", {"direction": "heads", "layer": 2, "site": "resid_post"})
    assert (code, "for the site z" in error["message"]) == (400, True)
    code, error = page("direction/tokens", name="heads", layer=2)
    assert (code, "residual stream" in error["message"]) == (400, True)


def test_separation_is_measured_on_examples_that_were_held_out():
    """With more dimensions than examples, any two sets can be separated; held-out examples show that these cannot."""
    rng = np.random.default_rng(3)

    def examples(shift, count=20):
        values = rng.normal(size=(count, 2, 1, 200))
        values[:, 1, :, 7] += shift
        return [activations(item) for item in values]

    found = separations(examples(8), examples(-8), (0, 1))
    assert found["layers"] == [0, 1]
    assert 0.2 < found["areas"][0] < 0.8
    assert found["areas"][1] > 0.95
    assert separations(examples(1, 1), examples(0, 5), (0, 1)) is None


def test_health_has_the_load_and_the_clock_that_it_belongs_to(page, peer):
    peer.script.load = {"running_requests": 2, "generated_tokens": 7, "acknowledged_bytes": 9}
    load = page("health")["load"]
    assert (load["running_requests"], load["generated_tokens"], load["acknowledged_bytes"]) == (2, 7, 9)
    assert load["ring_bytes"] == 1 << 28
    assert abs(load["at"] - time.time()) < 30
    peer.script.is_old = True
    assert page("health")["load"] is None


def test_health_and_findings(page):
    assert page("doctor")["findings"] == [{"check": "model", "ok": True, "detail": "fine", "warning": False}]
    health = page("health")
    assert health["inference"] == "SERVING" or health["inference"]
    assert health["stats"][0]["num_bytes"] >= 0
    assert page("model")["layers"] == LAYERS
    assert page("about")["endpoint"]
