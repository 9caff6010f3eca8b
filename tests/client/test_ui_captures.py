"""The app of `residuum ui`: captures, grids and rows, compared with what the client reads."""

import numpy as np
import pytest

pytest.importorskip("starlette")

from peer import HIDDEN, LAYERS
from ui_page import Page, array

import residuum
from residuum.ui.grids import _tiles
from residuum.ui.measures import Grid

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


def test_a_row_has_statistics_and_predicted_tokens(page, capture):
    name = capture.manifest.capture_id
    found = page("row", id=name, layer=3, position=2)
    row = capture[3][2].astype(np.float64)
    assert found["norm"] == pytest.approx(np.linalg.norm(row))
    assert found["mean"] == pytest.approx(row.mean())
    assert found["max"] == row.max()
    assert found["largest"][0] == [int(np.argmax(np.abs(row))), np.abs(row).max()]
    assert [text for _, text, _ in found["lens"]][:2] == ["<1>", "<2>"]
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
