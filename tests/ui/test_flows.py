"""Each flow of the page, clicked through in Chromium, with SmolLM2."""

import contextlib
import csv
import io
import json
import re
import urllib.parse

import numpy as np
import pytest

pytest.importorskip("playwright")
pytest.importorskip("starlette")

from PIL import Image
from playwright.sync_api import expect

import residuum
from tests.ui.conftest import LESS, MORE
from tests.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.shares_engine("ui")]

MINUTE = 60_000


def state_of(page):
    """The state of the view in the URL."""
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(page.url).fragment.partition("?")[2]))


def saved_csv(page, click):
    with page.expect_download() as waiting:
        click()
    with waiting.value.path().open(newline="") as file:
        return list(csv.reader(file))


def test_the_token_opens_the_page_and_leaves_the_url(address, visit, browser):
    seen = visit(address)
    assert "token" not in seen.page.url
    cookies = seen.page.context.cookies()
    assert [(cookie["httpOnly"], cookie["sameSite"]) for cookie in cookies] == [(True, "Strict")]
    seen.page.reload()  # the cookie is enough
    expect(seen.page.get_by_role("heading", name="Captures")).to_be_visible()


def test_a_wrong_token_is_refused_and_the_right_one_accepted(address, browser):
    page = browser.new_context().new_page()
    page.goto(f"{address.partition('?')[0]}?token=wrong#health")
    expect(page.get_by_text("This token is wrong")).to_be_visible()
    expect(page.get_by_role("navigation")).to_have_count(0)
    page.get_by_label("Token").fill(address)
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("heading", name="Health")).to_be_visible()
    page.context.close()


def test_captures_are_searched_sorted_and_opened(address, visit, captured):
    seen = visit(address)
    seen.expects_failures = True  # a filter that cannot be parsed
    page = seen.open("captures")
    expect(page.get_by_role("link", name="tale")).to_be_visible()
    page.get_by_label("Search in IDs and labels").fill("facts")
    expect(page.get_by_role("link", name="tale")).to_have_count(0)
    expect(page).to_have_url(re.compile("text=facts"))
    page.get_by_label("Search in IDs and labels").fill("")
    page.get_by_label("Label filter").fill("kind = tale")
    page.get_by_label("Label filter").press("Enter")
    expect(page.get_by_role("link", name="facts")).to_have_count(0)
    page.get_by_label("Label filter").fill("kind =")
    page.get_by_label("Label filter").press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("Label filter").fill("")
    page.get_by_label("Label filter").press("Enter")
    page.get_by_role("button", name="Capture", exact=True).click()
    page.get_by_role("button", name="Capture ↓").click()
    names = page.locator("tbody a").all_inner_texts()
    assert names == sorted(names)
    rows = saved_csv(page, page.get_by_role("button", name="CSV").click)
    assert {"tale", "facts"} <= {row[0] for row in rows[1:]}
    page.get_by_role("link", name="tale").click()
    expect(page.get_by_role("heading", name="tale", level=1)).to_be_visible()


def test_a_capture_shows_its_numbers(address, visit, client, joy, captured):
    """The values that the page shows are those of the rows that the client reads."""
    page = visit(address).open("capture", id="tale", measure="projection", direction="joy", layer=12)
    acts = client.activations("tale")
    wanted = joy.project(acts)[12]
    expect(page.get_by_role("application")).to_be_visible()  # it moves the text down
    expect(page.get_by_text("Computing…")).to_have_count(0)
    token = page.locator(".token").nth(5)
    token.hover()
    expect(page.get_by_role("status").filter(has_text="position 5")).to_contain_text(f"token {acts.token_ids[5]} ")
    token.click()
    expect(page).to_have_url(re.compile("position=5"))
    expect(page.get_by_role("heading", name="Row of layer 12, position 5")).to_be_visible()
    norm = page.locator("dt:text-is('Norm') + dd")
    assert float(norm.inner_text()) == pytest.approx(np.linalg.norm(acts[12][5]), abs=0.06)
    projection = page.locator("dt:text-is('Projection onto joy') + dd")
    assert float(projection.inner_text()) == pytest.approx(wanted[5], rel=1e-2, abs=1e-3)
    expect(page.get_by_text("Tokens that it predicts")).to_be_visible()
    text = page.get_by_role("region", name="Text of tale")
    rows = saved_csv(page, text.get_by_role("button", name="CSV").click)
    np.testing.assert_allclose([float(row[3]) for row in rows[1 : len(wanted) + 1]], wanted, rtol=1e-4, atol=1e-4)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="PNG").click()
    with Image.open(waiting.value.path()) as picture:
        drawn = page.get_by_role("application").evaluate("map => [map.width, map.height]")
        assert picture.width > drawn[0]  # the numbers of the layers
        assert picture.height > drawn[1]  # the heading and the positions
        assert len(picture.convert("RGB").crop((0, 0, picture.width, 20)).getcolors()) > 2


def test_the_keyboard_moves_through_tokens_and_cells(address, visit, captured):
    page = visit(address).open("capture", id="tale", layer=12, position=3)
    tokens = page.get_by_role("listbox")
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token.chosen")).to_have_attribute("data-at", "4")
    page.keyboard.press("End")
    last = page.locator(".token").count() - 1
    expect(page.locator(".token.chosen")).to_have_attribute("data-at", str(last))
    page.keyboard.press("Home")
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("heading", name="Row of layer 13, position 1")).to_be_visible()
    expect(page).to_have_url(re.compile("layer=13&position=1"))  # it follows a moment later


def test_a_link_reproduces_the_view(address, visit, captured):
    page = visit(address).open("capture", id="tale")
    page.get_by_label("Measure").select_option("cosine")
    page.get_by_label("Its vector").select_option("12")
    page.get_by_label("Layer of the text").select_option("20")
    page.get_by_label("Zoom in").click()
    expect(page).to_have_url(re.compile("first="))
    link = page.url.partition("#")[2]
    other = visit(address).page
    other.goto(f"{other.url.partition('#')[0]}#{link}")
    expect(other.get_by_role("heading", name="Cosine with joy, layer × position")).to_be_visible()
    expect(other.get_by_label("Layer of the text")).to_have_value("20")
    expect(other.get_by_label("Its vector")).to_have_value("12")
    expect(other.get_by_text("position 0", exact=True)).to_have_count(1 if state_of(page).get("first") == "0" else 0)


def run_python(page, index=0):
    """Run the lines that the page offers to copy, as a program of its own, and return its variables and its output."""
    code = page.get_by_label("Python code").nth(index)
    if not code.is_visible():
        page.get_by_text("Python that does the same").nth(index).click()
    code = code.inner_text()
    namespace, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "copied", "exec"), namespace)
    namespace["client"].close()
    return namespace, printed.getvalue()


@pytest.mark.parametrize(
    ("name", "state", "layers"),
    [
        ("tale", {"measure": "norm"}, range(30)),
        ("tale", {"measure": "projection", "direction": "joy"}, range(30)),
        ("tale", {"measure": "cosine", "direction": "joy", "from": 12}, range(30)),
        ("tale", {"measure": "probe"}, [12]),
        ("tale", {"measure": "probe", "probe": "feeling", "output": 1, "from": "all"}, range(30)),
        ("tale", {"measure": "feature", "feature": 7, "sae": "tiny", "layer": 11}, [11]),
        ("features", {"measure": "feature", "feature": 7}, [12]),
    ],
)
def test_the_python_of_a_view_gives_the_numbers_of_the_view(address, visit, captured, features, name, state, layers):
    page = visit(address).open("capture", id=name, **state)
    heat = page.get_by_role("region", name=f"Heat map of {name}")
    expect(heat.get_by_role("application")).to_be_visible()
    rows = saved_csv(page, heat.get_by_role("button", name="CSV").click)
    grid = run_python(page)[0]["grid"]
    assert [int(row[0]) for row in rows[1:]] == list(layers)
    assert len(grid) == len(rows) - 1
    for layer, *values in rows[1:]:
        there = [float(value) for value in values[:-1]]  # the last token has no row
        np.testing.assert_allclose(there, grid[int(layer)], rtol=1e-4, atol=1e-4)
    if len(layers) == 30:
        page.get_by_label("Heat map layers").fill("3, 10-12")
        page.get_by_label("Heat map layers").press("Enter")
        some = saved_csv(page, heat.get_by_role("button", name="CSV").click)
        assert some == [rows[0], rows[4], *rows[11:14]]


def test_the_python_of_every_other_view_runs(address, visit, captured, client, joy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = visit(address)
    before = {item.capture_id for item in client.captures()}

    page = seen.open("captures", where="kind = tale")
    assert run_python(page)[1].startswith("tale complete ")

    page = seen.open("compare", a="tale", b="facts", measure="projection", direction="joy")
    expect(page.get_by_role("application")).to_have_count(2)
    found = run_python(page)[0]  # that of the second capture is left
    np.testing.assert_allclose(found["grid"][12], joy.project(client.activations("facts"))[12], rtol=1e-4, atol=1e-4)

    operations = [
        {"kind": "add", "direction": "joy", "layers": "12", "from": "", "scale": 3, "phase": "generated"},
        {"kind": "ablate", "direction": "joy", "layers": "3-5", "from": "12", "scale": 1, "phase": "all"},
        {"kind": "cap", "direction": "joy", "layers": "7", "from": "", "min": -1, "max": 2, "phase": "prompt"},
        {"kind": "replace", "direction": "joy", "layers": "9", "from": "9", "value": 1.5, "phase": "all"},
    ]
    for mode in ("text", "chat"):
        settings = {"mode": mode, "prompt": "Say hello.", "system": "Be brief.", "max_tokens": 6, "columns": [
            {"name": "Unsteered", "canSteer": False, "operations": []},
            {"name": "A", "canSteer": True, "operations": operations}]}  # fmt: skip
        page = seen.open("generate", s=json.dumps(settings))
        page.get_by_role("button", name="Generate", exact=True).click()
        expect(page.locator(".badge", has_text="done")).to_have_count(2, timeout=MINUTE)
        shown = [page.get_by_label(f"Text of {name}").inner_text() for name in ("Unsteered", "A")]
        assert run_python(page)[1].split() == " ".join(shown).split()

    page = seen.open("directions", new=1)
    page.get_by_label(re.compile("More of this")).fill("\n".join(MORE))
    page.get_by_label(re.compile("Less of this")).fill("\n".join(LESS))
    page.get_by_role("form", name="New direction from prompts").get_by_label("Name").fill("mine")
    run_python(page)
    made = residuum.Directions.load(tmp_path / "mine.safetensors")
    assert made[12].values @ joy[12].values > 0.99 * made[12].norm * joy[12].norm

    page = seen.open("directions", name="joy", layer=12, where="kind = tale", by="cosine")
    expect(page.get_by_role("region", name="Search")).to_be_visible()
    wanted = client.search(joy[12].values, layer=12, k=100, where="kind = tale", positions="1:", measure="cosine")
    assert wanted[0].capture_id in run_python(page)[1]

    page = seen.open("directions", probe="feeling")
    expect(page.get_by_role("region", name="Probe")).to_contain_text("joy, grief")
    assert "{'probe': array([" in run_python(page)[1]

    page = seen.open("health")
    assert "SmolLM2" in run_python(page)[1]
    client.delete([item.capture_id for item in client.captures() if item.capture_id not in before])


def test_features_are_chosen_from_the_strongest_of_a_row(address, visit, client, features):
    seen = visit(address)
    seen.expects_failures = True  # a feature that does not exist
    page = seen.open("capture", id=features, position=3)
    strongest = page.locator("dt:text-is('Strongest features') + dd").get_by_role("button").first
    row = client.activations(features)[12][3]
    expect(strongest).to_have_text(str(np.argmax(row)))
    strongest.click()
    expect(page.get_by_role("heading", name=f"Feature {np.argmax(row)}, layer × position")).to_be_visible()
    expect(page.locator("dt", has_text=f"Feature {np.argmax(row)}").locator("+ dd")).to_have_text(f"{row.max():.3f}")
    page.get_by_label("Feature", exact=True).fill("999")
    page.get_by_label("Feature", exact=True).press("Enter")
    expect(page.get_by_role("alert").first).to_contain_text("the rows have the features 0 to 255")


def test_a_probe_is_uploaded_and_scores_a_capture(address, visit, gallery, probe, captured, tmp_path):
    probe.save(tmp_path / "second.safetensors")
    page = visit(address).open("directions", new=1)
    form = page.get_by_role("form", name="New direction from a file")
    form.get_by_label("File").set_input_files(tmp_path / "second.safetensors")
    form.get_by_role("button", name="Add to the gallery").click()
    expect(page.get_by_role("region", name="Probe")).to_contain_text("softmax")
    page = visit(address).open("capture", id="tale", layer=3)
    page.get_by_label("Measure").select_option("probe")
    page.get_by_role("combobox", name="Probe", exact=True).select_option("second")
    page.get_by_role("combobox", name="Output", exact=True).select_option("grief")
    expect(page.get_by_label("Layer of the text")).to_have_value("12")  # the probe's
    expect(page.get_by_role("heading", name="Score of second, layer × position")).to_be_visible()
    expect(page.locator(".legend").first).to_have_text("0.0001.000")
    (gallery / "second.safetensors").unlink()


def test_labels_are_changed(address, visit, client, captured):
    page = visit(address).open("capture", id="facts")
    page.get_by_label("New label").fill("checked = true")
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_text("checked: true")).to_be_visible()
    assert client.manifest("facts").labels["checked"] is True
    page.get_by_label("Remove the label checked").click()
    expect(page.get_by_text("checked: true")).to_have_count(0)


def test_two_captures_are_compared(address, visit, captured):
    page = visit(address).open("captures")
    for name in captured:
        page.get_by_label(f"Pick {name} to compare").check()
    page.get_by_role("link", name="Compare the two").click()
    expect(page.get_by_role("application")).to_have_count(2)
    expect(page.get_by_role("listbox")).to_have_count(2)
    page.get_by_role("listbox").first.locator(".token").nth(2).click()
    expect(page.locator(".token.chosen")).to_have_count(2)  # the same position in both


def column(name, scale):
    operation = {"kind": "add", "direction": "joy", "layers": "12", "from": "", "scale": scale, "min": None, "max": 1,
                 "value": 0, "phase": "all"}  # fmt: skip
    return {"name": name, "canSteer": True, "operations": [operation]}


def test_three_columns_have_the_same_seed_and_their_own_steering(address, visit, client, joy):
    settings = {"prompt": "When I opened the door, I saw", "max_tokens": 12, "columns": [
        {"name": "Unsteered", "canSteer": False, "operations": []}, column("A", 3), column("B", -3)]}  # fmt: skip
    page = visit(address).open("generate", s=json.dumps(settings))
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator(".badge", has_text="done")).to_have_count(3, timeout=MINUTE)
    expect(page.get_by_role("application")).to_have_count(3)  # the heat maps
    for name, scale in (("Unsteered", 0), ("A", 3), ("B", -3)):
        steer = residuum.Add(joy[12], layer=12, scale=scale) if scale else None
        wanted = client.generate(
            settings["prompt"], max_tokens=12, temperature=0, seed=1, steer=steer, capture=residuum.Capture()
        )
        shown = page.get_by_role("group", name=f"Text of {name}").inner_text()
        assert shown.split() == wanted.text.split()
    page.get_by_text("Python that does the same").click()
    code = page.get_by_label("Python code").inner_text()
    assert 'direction.add(scale=3, layers="12")' in code
    page.get_by_role("link", name="Open capture").first.click()
    expect(page.get_by_role("listbox")).to_be_visible()


def test_the_scale_changes_while_it_generates_and_stop_ends_it(address, visit, client):
    settings = {"prompt": "Once upon a time", "max_tokens": 700, "columns": [column("A", 0)]}
    page = visit(address).open("generate", s=json.dumps(settings))
    page.get_by_role("button", name="Generate", exact=True).click()
    text = page.get_by_role("group", name="Text of A")
    expect(text).to_have_text(re.compile(r"\w+ \w+ \w+"), timeout=MINUTE)
    page.get_by_label("Scale", exact=True).fill("2.5")
    mark = text.locator(".mark")
    expect(mark).to_have_text(re.compile(r"joy scale 2\.5 from token \d+"), timeout=MINUTE)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".badge", has_text="stopped")).to_be_visible(timeout=MINUTE)
    page.get_by_role("link", name="Open capture").click()
    expect(page.locator("h1 + .badge")).to_have_text("aborted", timeout=MINUTE)
    manifest = client.manifest(page.get_by_role("heading", level=1).inner_text(), wait=10)
    (change,) = manifest.steering_changes
    assert change.steering[0].scale == 2.5


def test_a_sweep_shows_dose_and_response(address, visit, client):
    settings = {"prompt": "When I opened the door, I saw", "max_tokens": 8, "keep": False, "columns": [column("A", 1)]}
    before = len(list(client.captures()))
    page = visit(address).open("generate", s=json.dumps(settings))
    sweep = page.get_by_role("region", name="Dose and response")
    sweep.get_by_label("Steps").fill("3")
    sweep.get_by_label("Projection at layer").select_option("12")
    sweep.get_by_role("button", name="Run the sweep").click()
    expect(sweep.get_by_role("row")).to_have_count(4, timeout=MINUTE)
    rows = saved_csv(page, sweep.get_by_role("button", name="CSV").click)
    assert [float(row[0]) for row in rows[1:]] == [-4, 0, 4]
    low, middle, high = (float(row[1]) for row in rows[1:])
    assert low < middle < high  # what is added along a direction moves the projection onto it
    expect(sweep.get_by_role("img", name=re.compile("Mean projection by scale"))).to_be_visible()
    # The server deletes the captures after the last point.
    wait_for(lambda: len(list(client.captures())) == before, "the captures of the sweep are deleted")


def test_a_conversation_is_generated(address, visit):
    page = visit(address).open("generate")
    page.get_by_label("Prompt is").select_option("chat")
    page.get_by_label("Message", exact=True).fill("Say hello.")
    page.get_by_label("System message").fill("You are brief.")
    page.get_by_label("Maximum tokens").fill("8")
    page.get_by_label("Message", exact=True).press("Control+Enter")
    expect(page.locator(".badge", has_text="done")).to_be_visible(timeout=MINUTE)


def test_a_direction_is_made_renamed_exported_and_deleted(address, visit, gallery, client):
    page = visit(address).open("directions", new=1)
    page.get_by_label(re.compile("More of this")).fill("\n".join(MORE))
    page.get_by_label(re.compile("Less of this")).fill("\n".join(LESS))
    form = page.get_by_role("form", name="New direction from prompts")
    form.get_by_label("Name").fill("mood")
    before = len(list(client.captures()))
    form.get_by_role("button", name="Make the direction").click()
    expect(page.get_by_role("heading", name="mood")).to_be_visible(timeout=MINUTE)
    expect(page.get_by_role("img", name=re.compile("Separation by layer"))).to_be_visible()
    assert len(list(client.captures())) == before
    assert residuum.Directions.load(gallery / "mood.safetensors").layers == tuple(range(30))
    for kind, load in (("safetensors", residuum.Directions.load), ("GGUF", residuum.Directions.from_gguf)):
        with page.expect_download() as waiting:
            page.get_by_role("link", name=kind, exact=True).click()
        target = gallery.parent / f"export.{kind.lower()}"
        waiting.value.save_as(target)
        assert load(target)[12] == residuum.Directions.load(gallery / "mood.safetensors")[12]
    manage = page.get_by_role("region", name="Rename or delete")
    manage.get_by_label("Name").fill("mood 2")
    manage.get_by_role("button", name="Rename").click()
    expect(page.get_by_role("heading", name="mood 2")).to_be_visible()
    manage.get_by_role("button", name="Delete…").click()
    manage.get_by_role("button", name="Delete permanently").click()
    expect(page.get_by_role("link", name=re.compile("mood 2"))).to_have_count(0)
    assert not list(gallery.glob("mood*"))


def test_a_file_is_uploaded(address, visit, gallery, tmp_path):
    np.save(tmp_path / "single.npy", np.ones(576, np.float32))
    page = visit(address).open("directions", new=1)
    form = page.get_by_role("form", name="New direction from a file")
    form.get_by_label("File").set_input_files(tmp_path / "single.npy")
    expect(form.get_by_label("Name")).to_have_value("single")
    form.get_by_label("Layer, if one vector").fill("7")
    form.get_by_role("button", name="Add to the gallery").click()
    expect(page.get_by_role("heading", name="single")).to_be_visible()
    expect(page.get_by_role("region", name="Tokens it promotes").locator("dd").first).to_be_visible()  # all is read
    assert residuum.Directions.load(gallery / "single.safetensors").layers == (7,)
    (gallery / "single.safetensors").unlink()


def test_tokens_are_found_and_lead_to_their_capture(address, visit, client, joy, captured):
    page = visit(address).open("directions", name="joy", layer=12, where="kind = tale")
    page.get_by_role("button", name="Search").click()
    found = client.search(joy[12].values / joy[12].norm, layer=12, k=100, where="kind = tale", positions="1:")
    rows = page.get_by_role("region", name="Search").get_by_role("row")
    expect(rows).to_have_count(len(found) + 1)
    expect(page.locator("mark").first).to_have_text(found[0].token.replace("\n", "⏎"))
    rows.nth(1).get_by_role("link").click()
    expect(page.locator(".token.chosen")).to_have_attribute("data-at", str(found[0].position))


def test_health_says_what_doctor_says(address, visit, services):
    page = visit(address).open("health")
    expect(page.get_by_text("SmolLM2-135M-Instruct").first).to_be_visible()
    expect(page.locator(".finding")).not_to_have_count(0, timeout=MINUTE)
    expect(page.locator(".finding .badge.bad")).to_have_count(0)
    expect(page.locator(".badge", has_text="serving")).to_have_count(2)


def test_health_shows_what_runs(address, visit, client):
    page = visit(address).open("health")
    load = page.get_by_role("region", name="Load")
    running = load.locator("dt:text-is('Requests running') + dd")
    expect(running).to_have_text(re.compile(r"^0; the engine runs up to \d+ at once$"), timeout=MINUTE)
    stream = client.stream("Once upon a time", max_tokens=900, capture=residuum.Capture(), request_id="running")
    with stream:
        next(iter(stream))
        expect(running).to_have_text(re.compile("^1;"))
        expect(load.locator("dt:text-is('Captures open') + dd")).to_have_text("1")
        expect(load.locator("dt:text-is('Throughput') + dd")).to_have_text(re.compile(r"^[1-9]\d*\.\d generated"))
        expect(load.locator("dt:text-is('Rows to the stores') + dd")).to_have_text(re.compile("[KM]iB/s$"))
    expect(running).to_have_text(re.compile("^0;"), timeout=MINUTE)
    expect(load.get_by_role("img", name=re.compile("Generated tokens per second"))).to_be_visible()


def test_a_reply_goes_on_while_another_view_is_shown(address, visit):
    settings = {"prompt": "Once upon a time", "max_tokens": 40, "columns": [column("A", 1)]}
    page = visit(address).open("generate", s=json.dumps(settings))
    views = page.get_by_role("navigation", name="Views")
    page.get_by_role("button", name="Generate", exact=True).click()
    views.get_by_role("link", name="Directions").click()  # at once: 40 tokens may take less than a second
    expect(page.get_by_role("heading", name="Directions")).to_be_visible()
    views.get_by_role("link", name="Generate").click()
    expect(page.locator(".badge", has_text="done")).to_be_visible(timeout=MINUTE)
    expect(page.get_by_text(re.compile(r"^40 tokens in"))).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_fits_and_follows_the_rules_of_axe(address, visit, captured, features, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    seen = visit(address, width=width, scheme=scheme)
    views = {
        "captures": {}, "capture": {"id": "tale", "position": 4, "measure": "projection", "direction": "joy"},
        "compare": {"a": "tale", "b": "facts"}, "generate": {"s": json.dumps({"columns": [column("A", 1)]})},
        "directions": {"name": "joy"}, "health": {},
    }  # fmt: skip
    found = {}
    more = [
        ("directions", {"new": 1}), ("directions", {"probe": "feeling"}), ("compare", {}),
        ("capture", {"id": "tale", "measure": "probe", "from": "all"}),
        ("capture", {"id": features, "measure": "feature", "feature": 7, "position": 3}),
    ]  # fmt: skip
    for view, state in [*views.items(), *more]:
        page = seen.open(view, **state)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        serious = [
            f"{item['id']}: {node['html'][:200]}"
            for item in axe.run(page).response["violations"]
            if item["impact"] in {"serious", "critical"}
            for node in item["nodes"]
        ]
        if serious:
            found[view] = serious
    assert not found
