"""The app of `residuum ui`: captures, grids and rows, compared with what the client reads."""

import numpy as np
import pytest

pytest.importorskip("starlette")

from starlette.responses import JSONResponse

import residuum
from residuum.directions.values import Origin
from residuum.ui.api.grids import _tiles
from residuum.ui.measures import Grid, statistics
from residuum.v1 import steering_pb2
from tests.client.support.peer import HIDDEN, LAYERS
from tests.client.ui.page_script import called
from tests.client.ui.ui_page import Page, array

HOSTILE = "<img src=x onerror=alert(1)>\"'&\u202e"


@pytest.fixture
def page(endpoint, tmp_path):
    running = Page(endpoint, tmp_path / "gallery", list)
    yield running
    running.stop()


@pytest.fixture
def joy(page, tmp_path):
    """A direction with a vector for some layers, in the gallery."""
    rng = np.random.default_rng(0)
    directions = residuum.Directions({layer: rng.normal(size=HIDDEN) for layer in (1, 3)})
    (tmp_path / "gallery").mkdir(exist_ok=True)
    directions.save(tmp_path / "gallery" / "joy.safetensors")
    return directions


@pytest.fixture
def capture(endpoint):
    """A capture of all layers with two sequences and hostile labels."""
    with residuum.Client(endpoint) as client:
        reply = client.generate(
            "a bb ccc", max_tokens=6, n=2, capture=residuum.Capture(layers="all", labels={"split": HOSTILE, "y": 2.5})
        )
        client.manifest(reply, wait=True)
        yield client.activations(reply)
        client.delete(reply)


def test_lists_have_pages_and_filters(page, endpoint):
    with residuum.Client(endpoint) as client:
        for index in range(5):
            what = residuum.Capture(layers=[0], labels={"y": index})
            client.manifest(client.generate("a", capture=what, max_tokens=1, request_id=f"listed-{index}"), wait=True)
        first = page("captures", prefix="listed-", size=3)
        assert [item["id"] for item in first["captures"]] == ["listed-4", "listed-3", "listed-2"]
        assert first["captures"][0]["labels"] == {"y": 4}
        second = page("captures", prefix="listed-", size=3, page=first["next"])
        assert [item["id"] for item in second["captures"]] == ["listed-1", "listed-0"]
        assert second["next"] == ""
        assert len(page("captures", prefix="listed-", where="y >= 3")["captures"]) == 2
        assert page("captures", prefix="listed-", states="open")["captures"] == []
        code, error = page("captures", where="y >=")
        assert (code, error["kind"]) == (400, "InvalidRequest")
        assert page("captures", size="x")[0] == 400
        client.delete([f"listed-{index}" for index in range(5)])


def test_a_capture_is_described_with_its_tokens(page, capture):
    name = capture.manifest.capture_id
    found = page("capture", id=name)
    assert found["state"] == "complete"
    assert found["labels"] == {"split": HOSTILE, "y": 2.5}
    assert found["sites"] == [{"name": "resid_post", "layers": list(range(LAYERS)), "width": HIDDEN}]
    assert [item["tokens"] for item in found["sequences"]] == [9, 9]
    tokens = page("tokens", id=name, sequence=1)
    assert tokens["ids"][:8] == capture.select(sequence=1).token_ids.tolist()
    assert page("capture", id="nobody")[0] == 404
    assert page("capture", id="")[0] == 400


def test_a_change_of_the_steering_names_only_the_sequences_that_it_is_for(page, peer, endpoint):
    """A change by a rule is for one sequence."""
    peer.changes["ruled"] = [
        steering_pb2.SteeringChange(first_positions=[2**32 - 1, 5], rule="calm"),
        steering_pb2.SteeringChange(first_positions=[7, 6]),
    ]
    with residuum.Client(endpoint) as client:
        what = residuum.Capture(layers=[0])
        client.manifest(client.generate("a bb", max_tokens=6, n=2, capture=what, request_id="ruled"), wait=True)
        assert [change["first"] for change in page("capture", id="ruled")["changes"]] == [[None, 5], [7, 6]]
        client.delete("ruled")


@pytest.mark.parametrize(
    ("first", "text"), [([5], "5"), ([5, 7], "5, 7"), ([None, 5], "5 of sequence 1"), ([None, None], "")]
)
def test_the_page_names_the_sequence_of_a_change(first, text):
    assert called("core/format.js", "firstPositions", first) == text


@pytest.mark.parametrize("sequence", [0, 1])
def test_grids_are_those_of_the_rows(page, capture, joy, sequence):
    acts = capture.select(sequence=sequence)
    rows = acts.stack().astype(np.float64)
    name = acts.manifest.capture_id
    norms = np.linalg.norm(rows, axis=2)
    grid = page("grid", id=name, sequence=sequence)
    values = array(grid["values"], (LAYERS, grid["columns"]))
    assert grid["positions"] == 9
    np.testing.assert_allclose(values[:, :8], norms, rtol=1e-6)
    assert np.isnan(values[:, 8]).all()  # the last token has no row
    units = {layer: vector.values.astype(np.float64) / vector.norm for layer, vector in joy.items()}
    for layer in range(LAYERS):
        wanted = {"id": name, "sequence": sequence, "layer": layer, "direction": "joy"}
        projection = array(page("scores", **wanted, measure="projection")["values"])[:8]
        if layer not in joy:
            assert np.isnan(projection).all()
            continue
        np.testing.assert_allclose(projection, rows[layer] @ units[layer], rtol=1e-5)
        cosine = array(page("scores", **wanted, measure="cosine")["values"])[:8]
        np.testing.assert_allclose(cosine, rows[layer] @ units[layer] / norms[layer], rtol=1e-5)
    one = array(
        page("scores", id=name, sequence=sequence, layer=0, measure="projection", direction="joy", **{"from": 3})[
            "values"
        ]
    )
    np.testing.assert_allclose(one[:8], rows[0] @ units[3], rtol=1e-5)


def test_a_direction_measures_only_rows_of_its_kind(page, endpoint, joy, tmp_path):
    for site in ("z", "attn_out"):
        made = residuum.Directions(joy, origin=Origin(site=site))
        made.save(tmp_path / "gallery" / f"{site}.safetensors")
    with residuum.Client(endpoint) as client:
        capture = residuum.Capture(layers=[1], sites=["resid_post", "z"])
        reply = client.generate("a bb ccc", max_tokens=2, capture=capture)
        client.manifest(reply, wait=True)
        acts = client.activations(reply)
        for measure in ("projection", "cosine"):
            asked = {"id": reply.request_id, "measure": measure, "layer": 1}
            code, error = page("scores", **asked, direction="z", site="resid_post")
            assert (code, "Choose the site z" in error["message"]) == (400, True)
            assert page("scores", **asked, direction="joy", site="z")[0] == 400
            assert "values" in page("scores", **asked, direction="attn_out", site="resid_post")
        found = array(page("scores", **asked | {"measure": "projection"}, direction="z", site="z")["values"])
        wanted = residuum.Directions(joy, origin=Origin(site="z")).project(acts.select(site="z"))[1]
        np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=1e-5)
        client.delete(reply)


@pytest.mark.parametrize("measure", ["projection", "cosine", "probe", "feature"])
def test_projected_rows_have_no_measures_even_if_they_are_as_wide(page, endpoint, joy, tmp_path, measure):
    residuum.Probe(np.ones(HIDDEN), layer=1).save(tmp_path / "gallery" / "ones.safetensors")
    residuum.sae.save(residuum.SAE(np.eye(HIDDEN), np.eye(HIDDEN)), tmp_path / "gallery" / "eye.safetensors")
    with residuum.Client(endpoint) as client:
        capture = residuum.Capture(layers=[1], encoding="rp8", dimensions=HIDDEN)
        reply = client.generate("a bb ccc", max_tokens=2, capture=capture)
        client.manifest(reply, wait=True)
        asked = {"direction": "joy", "probe": "ones", "sae": "eye", "from": 1, "feature": 1}
        code, error = page("scores", id=reply.request_id, layer=1, measure=measure, **asked)
        assert (code, "encoded as 'rp8': other numbers" in error["message"]) == (400, True)
        assert "values" in page("scores", id=reply.request_id, layer=1, measure="norm")
        assert "lens" not in page("row", id=reply.request_id, layer=1, position=1)
        client.delete(reply)


@pytest.mark.parametrize("activation", [None, "sigmoid"])
def test_scores_of_a_probe_are_those_of_its_layer_or_of_all(page, capture, tmp_path, activation):
    rng = np.random.default_rng(2)
    weights, bias = rng.normal(size=(2, HIDDEN)), np.array([0.5, -1.0])
    probe = residuum.Probe(weights, bias, layer=2, activation=activation)
    (tmp_path / "gallery").mkdir(exist_ok=True)
    probe.save(tmp_path / "gallery" / "mood.safetensors")
    acts = capture.select(sequence=0)
    asked = {"id": capture.manifest.capture_id, "measure": "probe", "probe": "mood", "output": 1}
    for layers, source in (([2], ""), (range(LAYERS), "all")):
        grid = page("grid", **asked, **{"from": source})
        values = array(grid["values"], (LAYERS, -1))
        for layer in range(LAYERS):
            if layer not in layers:
                assert np.isnan(values[layer]).all()
                continue
            wanted = acts[layer].astype(np.float64) @ weights[1] + bias[1]
            wanted = 1 / (1 + np.exp(-wanted)) if activation else wanted
            np.testing.assert_allclose(values[layer][: len(wanted)], wanted, rtol=1e-4, atol=1e-5)
    row = page("row", **asked, layer=2, position=1)
    assert row["measure"] == pytest.approx(float(values[2][1]), rel=1e-5)
    assert page("grid", **{**asked, "output": 2})[0] == 400
    assert page("grid", **{**asked, "probe": "nobody"})[0] == 404
    residuum.Probe(weights, layer=2, site="attn_out").save(tmp_path / "gallery" / "mood.safetensors")
    assert "site attn_out" in page("grid", **asked)[1]["message"]
    residuum.Probe(weights, layer=LAYERS + 1).save(tmp_path / "gallery" / "mood.safetensors")
    assert "was not captured" in page("grid", **asked)[1]["message"]
    residuum.Probe(np.tile(weights, 2), layer=[1, 2]).save(tmp_path / "gallery" / "mood.safetensors")
    assert "reads 2 places" in page("grid", **asked)[1]["message"]


def test_scores_of_an_attention_probe_are_refused(page, peer, capture, tmp_path):
    """They depend on all rows before, but views score chunks of rows, or one row."""
    (tmp_path / "gallery").mkdir(exist_ok=True)
    probe = residuum.Probe.from_attention(np.ones((2, HIDDEN)), np.ones((2, HIDDEN)), layer=2)
    probe.save(tmp_path / "gallery" / "lie.safetensors")
    assert [item["attention"] for item in page("directions")["probes"]] == [True]
    asked = {"id": capture.manifest.capture_id, "measure": "probe", "probe": "lie"}
    for path, more in (("grid", {}), ("grid", {"from": "all"}), ("row", {"layer": 2, "position": 1})):
        code, error = page(path, **asked, **more)
        assert (code, "probe.score(acts[layer])" in error["message"]) == (400, True)
    ((name, data),) = page.events("live", {"captures": [asked]})
    assert (name, "has attention" in data["message"]) == ("problem", True)


@pytest.mark.parametrize(
    ("activation", "extra"), [("relu", {}), ("jumprelu", {"threshold": 0.7}), ("topk", {"active": 2})]
)
def test_a_feature_is_computed_by_an_sae_from_rows_of_one_layer(page, capture, tmp_path, activation, extra):
    rng = np.random.default_rng(3)
    encoder, bias = rng.normal(size=(5, HIDDEN)), rng.normal(size=5)
    sae = residuum.SAE(encoder, encoder, encoder_bias=bias, activation=activation, **extra)
    (tmp_path / "gallery").mkdir(exist_ok=True)
    residuum.sae.save(sae, tmp_path / "gallery" / "tiny.safetensors")
    asked = {"id": capture.manifest.capture_id, "measure": "feature", "sae": "tiny", "from": 3}
    rows = capture.select(sequence=0)[3].astype(np.float64)
    outputs = np.maximum(rows @ encoder.astype(np.float32).T.astype(np.float64) + bias, 0)
    if activation == "jumprelu":
        outputs[outputs <= 0.7] = 0
    if activation == "topk":
        outputs[outputs < np.sort(outputs, axis=1)[:, -2:-1]] = 0
    for feature in range(5):
        values = array(page("grid", **asked, feature=feature)["values"], (LAYERS, -1))
        np.testing.assert_allclose(values[3][: len(rows)], outputs[:, feature], rtol=1e-4, atol=1e-4)
        assert np.isnan(np.delete(values, 3, axis=0)).all()
    assert page("grid", **asked, feature=5)[0] == 400
    code, error = page("grid", id=capture.manifest.capture_id, measure="feature", feature=1)
    assert (code, "not as features" in error["message"]) == (400, True)


def test_the_gallery_tells_directions_probes_and_saes_apart(page, joy, tmp_path):
    folder = tmp_path / "gallery"
    residuum.Probe(np.ones(HIDDEN), layer=1).save(folder / "mood.safetensors")
    sae = residuum.SAE(np.ones((3, HIDDEN)), np.ones((3, HIDDEN)))
    residuum.sae.save(sae, folder / "tiny.safetensors")
    (folder / "saelens").mkdir()
    (folder / "saelens" / "cfg.json").write_text("{}")
    found = page("directions")
    assert [item["name"] for item in found["directions"]] == ["joy"]
    assert [(item["name"], item["layer"], item["outputs"]) for item in found["probes"]] == [("mood", 1, ["0"])]
    assert [item["name"] for item in found["saes"]] == ["saelens", "tiny"]
    content = (folder / "mood.safetensors").read_bytes()
    status, _, _ = page.raw(
        "POST", "/api/direction/upload?name=copy&file=x.safetensors", content, {"Cookie": page.cookie}
    )
    assert status == 200
    assert residuum.Probe.load(folder / "copy.safetensors") == residuum.Probe(np.ones(HIDDEN), layer=1)


def test_windows_may_be_longer_than_a_capture(page, capture):
    """So that two captures side by side are aligned."""
    name = capture.manifest.capture_id
    own, wide = page("grid", id=name), page("grid", id=name, span=40, columns=20)
    assert (wide["positions"], wide["last"], wide["columns"]) == (40, 39, 20)
    values = array(wide["values"], (LAYERS, 20))
    count = own["positions"]
    assert np.isnan(values[:, (count + 1) // 2 :]).all()
    assert (values[:, 0] == np.nanmax(array(own["values"], (LAYERS, -1))[:, :2], axis=1)).all()


def test_a_row_with_elements_that_are_no_numbers_is_described():
    found = statistics(np.array([3, np.nan, -4, np.inf, 0], np.float32))
    assert (found["norm"], found["min"], found["max"], found["not_finite"]) == (5, -4, 3, 2)
    assert found["largest"] == [[2, -4.0], [0, 3.0], [4, 0.0]]
    found = statistics(np.full(3, -np.inf, np.float16))
    assert (found["norm"], found["max"], found["largest"], found["not_finite"]) == (None, None, [], 3)
    for values in ([1, np.nan], [np.inf, -np.inf]):
        JSONResponse(statistics(np.array(values)))


def test_a_row_has_statistics_and_predicted_tokens(page, peer, capture):
    name = capture.manifest.capture_id
    found = page("row", id=name, layer=3, position=2)
    row = capture[3][2].astype(np.float64)
    assert found["norm"] == pytest.approx(np.linalg.norm(row))
    assert found["mean"] == pytest.approx(row.mean())
    assert found["max"] == row.max()
    assert found["largest"][0] == [int(np.argmax(np.abs(row))), np.abs(row).max()]
    assert [text for _, text, _ in found["lens"]][:2] == ["<1>", "<2>"]
    assert found["lens_model"] == capture.manifest.model
    peer.script.model = "another"  # of the same width
    assert page("row", id=name, layer=3, position=2)["lens_model"] == "another"
    assert "position 8" in page("row", id=name, layer=3, position=8)["missing"]  # the last token of a reply has no row
    assert page("row", id=name, layer=99, position=0)[0] == 400


def test_requests_that_make_no_sense_say_why(page, capture, joy):
    name = capture.manifest.capture_id
    for wanted in (
        {"measure": "charm"},
        {"measure": "projection"},
        {"measure": "projection", "direction": "joy", "from": "2"},
        {"measure": "projection", "direction": "../joy"},
        {"sequence": 7},
        {"sequence": -1},
        {"columns": "many"},
    ):
        code, error = page("grid", id=name, **wanted)
        assert code == 400, wanted
        assert error["message"]
    assert page("grid", id=name, measure="projection", direction="nobody")[0] == 404
    assert page("grid", id=name, site="nowhere")[0] == 404
    assert page("scores", id=name, layer=77)[0] == 400


def test_a_direction_of_another_width_is_refused(page, capture, tmp_path, joy):
    residuum.Directions({1: np.ones(HIDDEN + 1)}).save(tmp_path / "gallery" / "wide.safetensors")
    code, error = page("grid", id=capture.manifest.capture_id, measure="projection", direction="wide")
    assert (code, error["kind"]) == (400, "BadVector")


def test_a_capture_is_followed_while_it_is_written(page, peer, endpoint):
    import threading

    peer.script.hold = threading.Event()
    found = {}
    with residuum.Client(endpoint) as client:
        stream = client.stream("a bb ccc", max_tokens=5, capture=residuum.Capture(layers=[0, 2], flush_interval=1))
        with stream:
            next(iter(stream))
            name = stream.request_id
            assert page("grid", id=name)[0] == 400  # open: follow it
            reader = threading.Thread(
                target=lambda: found.update(events=page.events("live", {"captures": [{"id": name}, {"id": "nobody"}]}))
            )
            reader.start()
            peer.script.hold.set()
            for _ in stream:
                pass
        reader.join(30)
        others = [(event, data["kind"]) for event, data in found["events"] if data["index"] == 1]
        assert others == [("problem", "UnknownCapture")]
        assert page("live", {"captures": []})[0] == 400
        names = [event for event, data in found["events"] if data["index"] == 0]
        assert names[0] == "start"
        assert names[-1] == "end"
        values = {}
        for event, data in found["events"]:
            for tile in data["tiles"] if event == "tiles" else ():
                values |= {
                    (tile["layer"], tile["first"] + index): value for index, value in enumerate(array(tile["values"]))
                }
        acts = client.activations(name)
        for layer in acts:
            for at, row in zip(acts.positions, acts[layer], strict=False):
                assert values[layer, at] == pytest.approx(np.linalg.norm(row.astype(np.float64)))


def test_positions_with_gaps_are_followed_as_runs():
    positions = np.array([0, 1, 5, 6, 7, 9])
    tiles = list(_tiles(3, positions, positions.astype(np.float32)))
    assert [(tile["layer"], tile["first"], array(tile["values"]).tolist()) for tile in tiles] == [
        (3, 0, [0, 1]), (3, 5, [5, 6, 7]), (3, 9, [9])]  # fmt: skip


def test_labels_are_changed_and_captures_deleted(page, endpoint):
    with residuum.Client(endpoint) as client:
        client.manifest(
            client.generate("a", capture=residuum.Capture(layers=[0]), max_tokens=1, request_id="gone"), wait=True
        )
    assert page("capture/label", {"id": "gone", "labels": {"note": HOSTILE}})["labels"] == {"note": HOSTILE}
    assert page("capture/label", {"id": "gone", "labels": 3})[0] == 400
    texts = {"hex": "0x10", "large": str(2**53 + 1), "quoted": '"7"', "true": "true", "note": "2.5"}
    labels = {"hex": "0x10", "large": 2**53 + 1, "quoted": "7", "true": True, "note": 2.5}
    assert page("capture/label", {"id": "gone", "texts": texts})["labels"] == labels
    assert page("capture/delete", {"id": "gone"})["freed"] > 0
    assert page("capture/delete", {"id": "gone"})[0] == 404


def test_windows_keep_what_stands_out():
    rng = np.random.default_rng(1)
    grid = Grid((0, 1), 1000)
    grid.values[:] = rng.normal(size=(2, 1000))
    grid.values[1, 300:400] = np.nan
    part = grid.window(100, 899, 80)
    assert part.shape == (2, 80)
    for column in range(80):
        span = grid.values[:, 100 + 10 * column : 110 + 10 * column]
        for layer in range(2):
            there = span[layer][~np.isnan(span[layer])]
            if len(there):
                assert part[layer, column] == there[np.argmax(np.abs(there))]
            else:
                assert np.isnan(part[layer, column])
    assert (grid.window(5, 9, 80) == grid.values[:, 5:10]).all()
