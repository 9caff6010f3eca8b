"""The page with a real store and a scripted inference service: hostile texts, outages, many captures, long captures."""

import json
import os
import re
import threading
import time
import urllib.parse

import numpy as np
import pytest

pytest.importorskip("playwright")
pytest.importorskip("starlette")

from playwright.sync_api import expect

import residuum
from residuum.rpc.channels import open_channel
from residuum.v1 import capture_pb2, store_pb2, store_pb2_grpc
from residuum.wire.labels import to_label
from residuum.wire.rows.frames import append_prefix, checksum, chunk_prefix
from tests.store.support import POST, describe
from tests.ui.browser import serving
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

MINUTE = 60_000
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    '"><script>alert(2)</script>',
    "javascript:alert(3)",
    "{{7*7}}${alert(4)}",
    "\u202egnp.exe\u0000\u2028",
    "=HYPERLINK(0)",
]
SMOOTH = 50
"""Milliseconds. A longer task of the page would be seen as a stutter."""
IS_TIMED = "RESIDUUM_TEST_TIMES" in os.environ
"""Whether the machine does nothing else, as in `make test-ui`: then times count."""


def texts_of(items):
    return capture_pb2.TokenTexts(text="".join(items), lengths=map(len, items))


def write(endpoint, name, texts, *, layers=3, width=4, labels=None, before_seal=None):
    """Write a complete capture whose prompt has these token texts, straight to the store.

    `before_seal` is called while all rows are there and the capture is open.
    """
    count = len(texts)
    with open_channel(endpoint) as channel:
        stub = store_pb2_grpc.StoreServiceStub(channel)
        description = describe(name, layers=range(layers), prompt=count, width=width)
        description.spec.labels.extend(to_label(key, value) for key, value in (labels or {}).items())
        stub.OpenCapture(store_pb2.OpenCaptureRequest(description=description), timeout=30)
        append = channel.stream_stream("/residuum.v1.StoreService/AppendChunks", request_serializer=bytes)
        list(append(_messages(name, count, layers, width), timeout=120))
        if before_seal:
            before_seal()
        outcome = capture_pb2.SequenceOutcome(
            generated_token_ids=[0], finish_reason="stop", token_texts=texts_of(["."])
        )
        stub.SealCapture(
            store_pb2.SealCaptureRequest(
                capture_id=name, sequences=[outcome], outcome=capture_pb2.CAPTURE_STATE_COMPLETE,
                prompt_token_texts=texts_of(texts),
            ),
            timeout=60,
        )  # fmt: skip
    with residuum.Client(store=endpoint) as client:
        assert client.manifest(name, wait=60).is_complete


def _messages(name, count, layers, width):
    rng = np.random.default_rng(0)
    for number, first in enumerate(range(0, count, 32), 1):
        positions = range(first, min(first + 32, count))
        payload = rng.normal(size=(layers, len(positions), width)).astype("<f4").tobytes()
        header = capture_pb2.ChunkHeader(
            sequence=0, site=POST, layers=range(layers), positions=positions, dtype=describe().dtype, width=width,
            encoding=capture_pb2.ENCODING_RAW,
        )  # fmt: skip
        chunk = chunk_prefix(header, checksum(payload), len(payload)) + payload
        yield append_prefix(number, name, len(chunk)) + chunk


@pytest.fixture
def address(scripted):
    with serving(scripted.peer.endpoint, scripted.save_direction()) as found:
        yield found


def test_hostile_texts_are_only_texts(scripted, address, visit):
    """Whatever a label, a token, a file name or a link holds, it is shown and never run."""
    write(
        scripted.store.endpoint, "hostile", HOSTILE, labels={f"label-{at}": text for at, text in enumerate(HOSTILE[:4])}
    )
    seen = visit(address)
    page = seen.open("captures")
    expect(page.get_by_text(f"label-0: {HOSTILE[0]}")).to_be_visible()
    page = seen.open("capture", id="hostile", position=1)
    tokens = page.locator(".token")
    expect(tokens).to_have_count(len(HOSTILE) + 1)
    assert tokens.nth(0).inner_text() == HOSTILE[0]
    assert tokens.nth(1).inner_text() == HOSTILE[1]
    assert "\u202e" not in tokens.nth(4).inner_text()
    with page.expect_download() as waiting:
        page.get_by_role("region", name="Text of hostile").get_by_role("button", name="CSV").click()
    assert "'=HYPERLINK" in waiting.value.path().read_text()
    seen.expects_failures = True  # links to what does not exist
    for text in HOSTILE:
        for view, name in (
            ("capture", "id"),
            ("compare", "a"),
            ("directions", "name"),
            ("generate", "s"),
            ("captures", "text"),
        ):
            seen.open(view, **{name: text, "b": text, "site": text, "measure": text, "layer": text, "position": text})
    assert page.locator("#page img, #page script, #page iframe").count() == 0
    page.goto(f"{seen.base}#<img src=x onerror=alert(1)>")
    expect(page.get_by_role("heading", name="Captures")).to_be_visible()


def test_a_hostile_reply_is_only_text(scripted, address, visit):
    seen = visit(address)
    page = seen.open("generate")
    page.get_by_label("Prompt", exact=True).fill(HOSTILE[0])
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator(".badge", has_text="done")).to_be_visible()
    page.get_by_text("Python that does the same").click()
    expect(page.get_by_label("Python code")).to_contain_text(HOSTILE[0])


def test_a_store_that_is_away_is_named_until_it_is_back(scripted, address, visit):
    write(scripted.store.endpoint, "kept", ["a", "b"])
    seen = visit(address)
    seen.expects_failures = True
    page = seen.open("captures")
    expect(page.get_by_role("link", name="kept")).to_be_visible()
    scripted.store.process.kill()
    scripted.store.process.wait(20)
    banner = page.locator(".banner")
    expect(banner).to_contain_text("does not answer", timeout=MINUTE)
    expect(page.get_by_role("link", name="kept")).to_be_visible()  # what was loaded stays
    scripted.restart_store()
    expect(banner).to_have_count(0, timeout=MINUTE)
    page.get_by_role("link", name="kept").click()
    expect(page.locator(".token")).to_have_count(3)


def test_an_inference_service_that_is_away_is_named(scripted, address, visit):
    from tests.client.support.peer import RunningPeer

    seen = visit(address)
    seen.expects_failures = True
    port = int(scripted.peer.endpoint.rpartition(":")[2])
    page = seen.open("generate")
    scripted.peer.stop()
    expect(page.locator(".banner")).to_contain_text("inference service does not answer", timeout=MINUTE)
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.get_by_role("alert").first).to_be_visible(timeout=MINUTE)
    scripted.peer = RunningPeer(scripted.store.endpoint, port)
    expect(page.locator(".banner")).to_have_count(0, timeout=MINUTE)
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator(".badge", has_text="done")).to_be_visible(timeout=MINUTE)


def test_a_page_whose_own_server_ends_says_so(scripted, visit):
    with serving(scripted.peer.endpoint, scripted.save_direction()) as found:
        seen = visit(found)
        seen.expects_failures = True
        page = seen.open("captures")
    expect(page.locator(".banner")).to_contain_text("residuum ui", timeout=MINUTE)


def test_an_open_capture_is_watched_and_a_list_updates_itself(scripted, address, visit):
    scripted.peer.servicer.script.hold = threading.Event()
    seen = visit(address)
    page = seen.open("captures")
    expect(page.get_by_text("There are no captures yet")).to_be_visible()
    with residuum.Client(scripted.peer.endpoint) as client:
        stream = client.stream(
            "a bb ccc", max_tokens=8, request_id="growing", capture=residuum.Capture(flush_interval=1)
        )
        with stream:
            next(iter(stream))
            expect(page.get_by_role("row", name="growing").locator(".badge")).to_have_text("open")
            other = seen.page.context.new_page()
            other.goto(f"{seen.base}#capture?id=growing")
            expect(other.get_by_text("Growing while the request generates")).to_be_visible()
            scripted.peer.servicer.script.hold.set()
            for _ in stream:
                pass
    expect(page.get_by_role("row", name="growing").locator(".badge")).to_have_text("complete")
    expect(other.locator("h1 + .badge")).to_have_text("complete", timeout=MINUTE)
    expect(other.get_by_role("application")).to_be_visible()


def operation(direction="joy", **changes):
    return {"kind": "add", "direction": direction, "layers": "3", "from": "", "scale": 1, "phase": "all", **changes}


def columns(*steered):
    """The state of Generate with an unsteered column, and columns with these operations."""
    found = [{"name": "Unsteered", "canSteer": False, "operations": []}]
    found += [{"name": name, "canSteer": True, "operations": item} for name, item in zip("AB", steered, strict=False)]
    return json.dumps({"columns": found})


def test_three_columns_are_steered_and_stopped_while_they_generate(scripted, address, visit):
    """A browser opens six connections to a host: the streams of the page must leave some for its calls."""
    hold = scripted.peer.servicer.script.hold = threading.Event()
    page = visit(address).open("generate", s=columns([operation()], [operation(scale=2)]))
    page.get_by_role("button", name="Generate", exact=True).click()
    for name in ("Unsteered", "A", "B"):
        column = page.get_by_role("region", name=name, exact=True)
        expect(column.locator(".badge")).to_have_text("running")
        expect(column.get_by_label(f"Text of {name}")).not_to_be_empty()
    page.wait_for_timeout(500)  # the live heat maps have asked
    column = page.get_by_role("region", name="A", exact=True)
    column.get_by_label("Scale", exact=True).fill("3")
    expect(column.locator(".mark")).to_contain_text("scale 3 from")
    with page.expect_response("**/api/stop"):
        page.get_by_role("region", name="B", exact=True).get_by_role("button", name="Stop").click()
    hold.set()
    expect(page.get_by_role("region", name="B", exact=True).locator(".badge")).to_have_text("stopped")
    expect(column.locator(".badge")).to_have_text("done")
    expect(column.get_by_role("application")).to_be_visible()  # its heat map


def test_steering_cannot_change_in_a_reply_that_an_operators_rule_may_steer(scripted, address, visit):
    script = scripted.peer.servicer.script
    script.may_rule_steer, hold = True, threading.Event()
    script.hold = hold
    page = visit(address).open("generate", s=columns([operation()]))
    page.get_by_role("button", name="Generate", exact=True).click()
    column = page.get_by_role("region", name="A", exact=True)
    expect(column).to_contain_text("A rule of the operator may steer this reply")
    expect(column.get_by_label("Scale", exact=True)).to_be_disabled()
    hold.set()
    expect(column.locator(".badge")).to_have_text("done")
    expect(column.get_by_label("Scale", exact=True)).to_be_enabled()


def test_a_mark_is_after_the_token_of_the_first_steered_row(scripted, address, visit):
    """The token at that position was sampled before: the next token is the first that the change affects."""
    hold = scripted.peer.servicer.script.hold = threading.Event()
    page = visit(address).open("generate", s=columns([operation()]))
    page.get_by_label("Prompt", exact=True).fill("a bb")
    page.get_by_role("button", name="Generate", exact=True).click()
    column = page.get_by_role("region", name="A", exact=True)
    expect(column.get_by_label("Text of A")).to_have_text("3")
    with page.expect_response("**/api/steer") as answer:
        column.get_by_label("Scale", exact=True).fill("3")
    first = answer.value.json()["first_positions"][0]
    hold.set()
    expect(column.locator(".badge")).to_have_text("done")
    before, after = column.get_by_label("Text of A").inner_text().split(f"joy scale 3 from token {first + 1 - 2}")
    assert len(before.split()) == first + 1 - 2  # the reply's tokens up to the first steered row
    assert len(after.split()) > 2


def test_a_reply_says_which_steering_it_began_with(scripted, address, visit):
    """The controls may have changed since. The end of a long reply is in view."""
    page = visit(address).open("generate", s=columns([operation()]))
    page.get_by_label("Temperature").fill("0.75")
    page.get_by_label("Maximum tokens").fill("900")
    page.get_by_role("button", name="Generate", exact=True).click()
    column = page.get_by_role("region", name="A", exact=True)
    expect(column.locator(".badge")).to_have_text("done")
    column.get_by_label("Scale", exact=True).fill("3")
    expect(column).to_contain_text("Started with joy scale 1 at layer 3")
    text = column.get_by_label("Text of A")
    height, hidden = text.evaluate("box => [box.clientHeight, box.scrollHeight - box.scrollTop - box.clientHeight]")
    assert height < 400
    assert hidden < 2
    page.get_by_role("region", name="Unsteered", exact=True).get_by_text("900 tokens in").wait_for()
    assert page.get_by_text("Started with").count() == 1


def test_the_middle_of_the_layers_that_separate_best_is_chosen(scripted, address, visit):
    notes = {"separation": {"layers": [0, 1, 2, 3, 4, 5], "areas": [0.5, 1, 1, 1, 1, 1]}}
    (scripted.folder / "gallery" / "joy.residuum.json").write_text(json.dumps(notes))
    page = visit(address).open("directions", name="joy")
    expect(page.get_by_role("heading", name="Tokens in the stores that project most on layer 3")).to_be_visible()


def test_values_are_never_shown_under_another_title(scripted, address, visit):
    """A value of other keys is no value: not while the new one loads, and not if that fails.

    What failed because a service was away comes when the service is back.
    """
    write(scripted.store.endpoint, "kept", ["a", "b"], width=8)
    seen = visit(address)
    seen.expects_failures = True
    away = {"error": {"message": "away", "kind": "x"}}
    seen.page.route("**/api/capture?*", lambda route: route.fulfill(status=503, json=away), times=1)
    page = seen.open("capture", id="kept")
    expect(page.get_by_role("alert")).to_have_text("away")
    heat = page.get_by_role("region", name="Heat map of kept")
    expect(heat.get_by_role("application")).to_be_visible()
    page.route("**/api/grid?*", lambda route: route.fulfill(status=500, json={"error": {"message": "no", "kind": "x"}}))
    page.get_by_label("Measure").select_option("projection")
    expect(heat.get_by_role("alert")).to_have_text("no")
    expect(heat.get_by_role("application")).to_have_count(0)
    expect(heat.get_by_role("button", name="CSV")).to_be_disabled()
    expect(heat.get_by_role("button", name="PNG")).to_be_disabled()
    page = seen.open("directions", name="joy", layer=1)
    search = page.get_by_role("region", name="Search")
    search.get_by_role("button", name="Search").click()
    expect(search.locator("mark").first).to_be_visible()
    page.get_by_role("region", name="Tokens it promotes").get_by_label("Layer").select_option("2")
    expect(search.get_by_role("heading")).to_contain_text("layer 2")
    expect(search.locator("mark")).to_have_count(0)
    page = seen.open("generate", s=columns([operation()]))
    sweep = page.get_by_role("region", name="Dose and response")
    sweep.get_by_label("Steps").fill("2")
    sweep.get_by_role("button", name="Run the sweep").click()
    expect(sweep.get_by_role("row")).to_have_count(3)
    sweep.get_by_label("Projection at layer").select_option("5")
    expect(sweep.get_by_role("heading", level=3).first).to_contain_text("onto joy at layer 3")


def test_a_capture_that_is_deleted_and_replaced_while_it_is_shown(scripted, address, visit):
    """The values are never those of one capture, and the text that of another. Answers may take longer than a poll."""
    write(scripted.store.endpoint, "again", ["old"] * 2)
    seen = visit(address)
    seen.expects_failures = True
    page = seen.open("capture", id="again", layer=1)
    expect(page.locator(".token")).to_have_text(["old", "old", "."])
    with residuum.Client(store=scripted.store.endpoint) as client:
        client.delete("again")
    expect(page.get_by_role("alert")).to_contain_text("no capture 'again'")

    def look():
        expect(page.locator(".heat .foot span:last-child")).to_have_text("4")  # its heat map, while it is open
        page.route("**/api/capture?*", lambda route: (time.sleep(1.5), route.continue_()))

    write(scripted.store.endpoint, "again", ["new"] * 5, before_seal=look)
    expect(page.locator("h1 + .badge")).to_have_text("complete")
    expect(page.locator(".token")).to_have_text([*["new"] * 5, "."])
    expect(page.get_by_role("alert")).to_have_count(0)


def test_columns_of_several_positions_show_their_own_value(scripted, address, visit):
    write(scripted.store.endpoint, "wide", [" w"] * 1499)
    with residuum.Client(store=scripted.store.endpoint) as client:
        norms = np.linalg.norm(client.activations("wide")[1].astype(np.float64), axis=1)
    starts = np.arange(1024) * 1500 // 1024
    seen = visit(address)
    for column in (1, 500, 1022):
        position = int(starts[column])
        wanted = norms[position : starts[column + 1]].max()
        page = seen.open("capture", id="wide", layer=1, position=position)
        status = page.locator(".heat .status")
        expect(status).to_have_text(f"layer 1, largest near position {position} “ w”: {wanted:.3f}")
        page.get_by_role("application").press("ArrowRight")
        expect(status).to_contain_text(f"position {starts[column + 1]} ")


def test_a_link_to_what_is_missing_shows_no_values(scripted, address, visit):
    write(scripted.store.endpoint, "kept", ["a", "b"], width=8)
    seen = visit(address)
    for state, notice in (
        ({"measure": "cosine", "direction": "gone"}, "There is no direction gone."),
        ({"site": "attn_out"}, "The capture has no site attn_out."),
        ({"layer": 99}, "The capture has no layer 99"),
        ({"measure": "projection", "direction": "joy", "from": 77}, "The direction joy has no layer 77."),
        ({"measure": "feature", "feature": "seven"}, "There is no feature seven."),
        ({"sequence": 5}, "The capture has no sequence 5."),
        ({"layers": "first"}, "Heat map layers: first names no layer of the capture."),
    ):
        page = seen.open("capture", id="kept", **state)
        expect(page.get_by_role("alert")).to_contain_text(notice)
        expect(page.get_by_role("application")).to_have_count(0)
        expect(page.locator(".token")).to_have_count(0)


def test_a_link_is_followed_as_soon_as_it_is_there(address, browser):
    with browser.new_context() as context:
        context.add_init_script("""
            new MutationObserver((_, observer) => {
              const link = document.querySelector("nav a[href='#health']");
              if (link) { observer.disconnect(); link.click(); }
            }).observe(document, { childList: true, subtree: true });
        """)
        page = context.new_page()
        page.goto(address)
        expect(page.get_by_role("heading", level=1)).to_have_text("Health")


def test_a_link_is_followed_although_the_url_is_to_be_written(scripted, address, visit):
    """The timer that writes the state of the view into the URL may run between a link and its event."""
    write(scripted.store.endpoint, "moved", ["a", "b", "c"], width=8)
    page = visit(address).open("capture", id="moved", layer=1, position=0)
    expect(page.get_by_role("application")).to_be_visible()
    page.evaluate("""() => {
        const map = document.querySelector("[role=application]");
        const real = window.setTimeout, timers = [];
        window.setTimeout = (call) => timers.push(call);
        for (let at = 0; at < 2; at += 1)
            map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        location.hash = "#health";
        window.setTimeout = real;
        for (const call of timers) call();
    }""")
    expect(page.get_by_role("heading", level=1)).to_have_text("Health")


def test_links_that_make_no_sense_leave_a_page(scripted, address, visit):
    write(scripted.store.endpoint, "x", ["a"])
    seen = visit(address)
    for operations in ([{}], [None], [{"kind": 7, "scale": "x", "direction": []}]):
        page = seen.open("generate", s=columns(operations))
        expect(page.get_by_role("button", name="Generate", exact=True)).to_be_visible()
        expect(page.get_by_label("Scale", exact=True)).to_have_value("1")
    page = seen.open("compare", a="x", b="x", sequence=-1)
    expect(page.get_by_role("application")).to_have_count(2)
    name = "x." + "y" * 120
    write(scripted.store.endpoint, name, ["a"])
    page = seen.open("compare", a=name, b=name)  # also on a narrow page
    page.set_viewport_size({"width": 390, "height": 850})
    expect(page.locator(".token")).to_have_count(4)
    ids = page.locator(".token").evaluate_all("tokens => tokens.map((token) => token.id)")
    assert len(set(ids)) == 4
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_view_that_fails_says_so_and_starts_again(scripted, address, visit):
    seen = visit(address)
    seen.page.route(lambda url: "id=x" in url, lambda route: route.fulfill(json={"sites": 7}))
    page = seen.open("capture", id="x")
    expect(page.get_by_role("heading", name="This view cannot be shown")).to_be_visible()
    page.get_by_role("link", name="Health").click()
    expect(page.get_by_role("heading", name="Health")).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="Start again").click()
    expect(page.get_by_role("heading", name="Captures")).to_be_visible()


def test_drafts_and_replies_stay_after_another_view(scripted, address, visit):
    page = visit(address).open("generate")
    page.get_by_label("Prompt", exact=True).fill("a bb")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator(".badge", has_text="done")).to_be_visible()
    text = page.get_by_label("Text of Unsteered").inner_text()
    views = page.get_by_role("navigation", name="Views")
    views.get_by_role("link", name="Directions").click()
    page.get_by_role("link", name="New direction…").click()
    page.get_by_label("More of this").fill("yes")
    views.get_by_role("link", name="Generate").click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("a bb")
    expect(page.get_by_label("Text of Unsteered")).to_have_text(text)
    page.go_back()
    expect(page.get_by_label("More of this")).to_have_value("yes")
    page.get_by_label("Prompts are").select_option("1")
    page.get_by_text("Python that does the same").click()
    expect(page.get_by_label("Python code")).to_contain_text('generate_many([[{"role": "user", "content": "yes"}]]')


def write_many(stub, names):
    """Write aborted captures without rows. The store ends them in the background."""
    outcome = capture_pb2.SequenceOutcome(finish_reason="abort")
    opens = [store_pb2.OpenCaptureRequest(description=describe(name)) for name in names]
    list(stub.OpenCaptures(store_pb2.OpenCapturesRequest(opens=opens), timeout=60))
    seals = [
        store_pb2.SealCaptureRequest(capture_id=name, sequences=[outcome], outcome=capture_pb2.CAPTURE_STATE_ABORTED)
        for name in names
    ]
    stub.SealCaptures(store_pb2.SealCapturesRequest(seals=seals), timeout=60)


def test_the_list_follows_what_happens_elsewhere(scripted, address, visit):
    for name in ("first", "second"):
        write(scripted.store.endpoint, name, ["a"], labels={"name": name})
    page = visit(address).open("captures")
    expect(page.get_by_role("link", name="second")).to_be_visible()
    with residuum.Client(store=scripted.store.endpoint) as client:
        client.delete("second")
    expect(page.get_by_role("link", name="second")).to_have_count(0, timeout=10_000)
    expect(page.get_by_role("link", name="first")).to_be_visible()
    with open_channel(scripted.store.endpoint) as channel:  # more than the page asks for at a time
        write_many(store_pb2_grpc.StoreServiceStub(channel), [f"many-{number:03}" for number in range(120)])
    expect(page.get_by_text("121 of 121")).to_be_visible()
    late = []
    page.route("**/api/captures?size=100", lambda route: late.append(route))  # noqa: PLW0108 - playwright asks for the number of arguments
    while not late:
        page.wait_for_timeout(50)
    page.get_by_label("Label filter").fill("name = first")
    page.get_by_label("Label filter").press("Enter")
    expect(page.get_by_text("1 of 1", exact=True)).to_be_visible()
    with page.expect_response("**/api/captures?size=100"):
        late[0].continue_()  # the answer for the list without a filter
    page.wait_for_timeout(1000)  # less than a poll, which would mend the list
    assert page.locator("tbody a").all_inner_texts() == ["first"]


def test_the_python_of_a_page_with_a_store_alone_names_the_store(scripted, visit):
    store = scripted.store.endpoint
    with serving("", scripted.save_direction(), "--store", store) as found:
        page = visit(found).open("captures")
        page.get_by_text("Python that does the same").click()
        expect(page.get_by_label("Python code")).to_contain_text(f'residuum.Client(store="{store}")')


def states(stub):
    return stub.GetStats(store_pb2.GetStatsRequest(), timeout=60).captures


def longest_task(page, act, attempts=3):
    """Do something on a page, and return the longest time that its thread was busy, in milliseconds.

    The machine may be busy with something else, so the result is the best of a few attempts: what the page itself
    needs, it needs every time.
    """
    watch_tasks(page)
    found = []
    for _ in range(attempts):
        page.evaluate("window.longest = 0")
        act()
        page.wait_for_timeout(300)  # the browser reports a task after its end
        found.append(page.evaluate("window.longest"))
    return min(found)


def watch_tasks(page):
    """Have the page note its longest task from now on."""
    page.evaluate(
        "() => { window.longest = 0; new PerformanceObserver((list) => list.getEntries().forEach("
        "(entry) => { window.longest = Math.max(window.longest, entry.duration); })).observe({ type: 'longtask' }); }"
    )


def scroll(page, selector, steps=60):
    """Scroll an element from its top to its end, a frame at a time."""
    page.evaluate(
        """async ([selector, steps]) => {
            const box = document.querySelector(selector);
            for (let step = 1; step <= steps; step++) {
                box.scrollTop = ((box.scrollHeight - box.clientHeight) * step) / steps;
                await new Promise(requestAnimationFrame);
            }
        }""",
        [selector, steps],
    )


def test_ten_thousand_captures_are_listed_and_scrolled_smoothly(scripted, address, visit, record_property):
    with open_channel(scripted.store.endpoint) as channel:
        stub = store_pb2_grpc.StoreServiceStub(channel)
        for first in range(0, 10_000, 200):
            write_many(stub, [f"many-{number:05}" for number in range(first, first + 200)])
        # The store ends them in the background.
        is_open = capture_pb2.CAPTURE_STATE_OPEN
        wait_for(lambda: all(item.state != is_open for item in states(stub)), "all have ended", seconds=120, every=0.1)
    page = visit(address).open("captures")
    expect(page.get_by_text("10,000 of 10,000")).to_be_visible(timeout=MINUTE)
    assert page.locator("tbody tr").count() < 120
    busy = longest_task(page, lambda: scroll(page, ".captures"))
    record_property("longest_task_ms", busy)
    expect(page.get_by_role("link", name="many-00000")).to_be_visible()
    page.get_by_label("Search in IDs and labels").fill("many-04242")
    expect(page.get_by_text("1 of 10,000")).to_be_visible()
    assert busy <= SMOOTH or not IS_TIMED


def test_a_capture_of_32k_tokens_scrolls_smoothly(scripted, address, visit, record_property):
    words = [f" word{number}" for number in range(32_768)]
    write(scripted.store.endpoint, "long", words, layers=24, width=8)
    page = visit(address).open("capture", id="long", layer=3, measure="projection", direction="joy")
    expect(page.get_by_role("application")).to_be_visible(timeout=MINUTE)
    expect(page.locator(".token").first).to_be_visible()
    assert page.locator(".token").count() < 4000
    busy = longest_task(page, lambda: scroll(page, ".tokens"))
    record_property("longest_task_ms", busy)
    expect(page.locator("[data-at='32767']")).to_be_visible()
    page.get_by_label("Zoom in").click()
    expect(page.get_by_text("position 8192", exact=True)).to_be_visible()
    assert busy <= SMOOTH or not IS_TIMED


def test_a_live_capture_of_32k_tokens_is_drawn_smoothly(scripted, address, visit, record_property):
    """All rows come at once: the worst case, a long prompt whose capture is opened while the reply generates."""
    positions, layers = 32_768, 24
    seen = visit(address)
    page = seen.open("captures")
    watch_tasks(page)
    busy, shown = [], []

    def look():
        opened = page.get_by_role("application")
        for _ in range(3):
            seen.open("captures")
            page.evaluate("window.longest = 0")
            page.evaluate("location.hash = 'capture?id=growing&layer=3'")
            expect(page.locator(".heat .foot span:last-child")).to_have_text(str(positions - 1), timeout=MINUTE)
            page.wait_for_timeout(300)  # the browser reports a task after its end
            busy.append(page.evaluate("window.longest"))
        opened.hover(position={"x": 100, "y": 5})
        expect(page.locator(".heat .status")).to_contain_text("largest near position")
        shown.append(page.locator(".heat .status").inner_text())

    write(scripted.store.endpoint, "growing", [" w"] * positions, layers=layers, width=8, before_seal=look)
    record_property("longest_task_ms", min(busy))
    layer, first, value = re.fullmatch(r"layer (\d+), largest near position (\d+) .*: ([\d.]+)", shown[0]).groups()
    with residuum.Client(store=scripted.store.endpoint) as client:
        rows = client.activations("growing", layers=[int(layer)])[int(layer)][int(first) : int(first) + 32]
    assert float(value) == pytest.approx(np.linalg.norm(rows.astype(np.float64), axis=1).max(), abs=6e-4)
    expect(page.locator("h1 + .badge")).to_have_text("complete", timeout=MINUTE)
    assert min(busy) <= SMOOTH or not IS_TIMED


def tab_to(page, wanted):
    """Press Tab until an element has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if wanted.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"Tab does not reach {wanted}")


def test_the_page_is_used_with_the_keyboard_alone(scripted, address, visit):
    write(scripted.store.endpoint, "kept", ["a", "b", "c"], width=8)
    page = visit(address).open("captures")
    expect(page.get_by_role("link", name="kept")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    tab_to(page, page.get_by_role("link", name="kept"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("application")).to_be_visible()
    tab_to(page, page.get_by_label("Measure"))
    page.keyboard.press("ArrowDown")  # the next measure
    expect(page.get_by_role("heading", name="Projection onto joy, layer × position")).to_be_visible()
    tab_to(page, page.get_by_role("application"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("heading", name="Row of layer 2, position 1")).to_be_visible()
    tab_to(page, page.get_by_role("listbox"))
    page.keyboard.press("End")
    expect(page.get_by_role("heading", name="Row of layer 2, position 3")).to_be_visible()
    tab_to(page, page.get_by_text("Python that does the same"))
    page.keyboard.press("Enter")
    expect(page.get_by_label("Python code")).to_be_visible()
    page.reload()
    tab_to(page, page.get_by_role("navigation").get_by_role("link", name="Generate"))
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_label("Prompt", exact=True))
    page.keyboard.press("Control+A")
    page.keyboard.type("a bb")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".badge", has_text="done")).to_be_visible(timeout=MINUTE)
    tab_to(page, page.get_by_role("link", name="Open capture"))
    page.keyboard.press("Enter")
    expect(page.locator("h1 + .badge")).to_have_text("complete", timeout=MINUTE)
    tab_to(page, page.get_by_role("button", name="Delete this capture…"))
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_role("button", name="Delete permanently"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Captures")).to_be_visible()


def test_a_state_that_changes_often_leaves_the_url_in_time(scripted, address, visit):
    """Browsers refuse further changes of the URL after about a hundred in 30 seconds."""
    page = visit(address).open("generate")
    page.evaluate(
        "() => { window.changes = 0; const own = history.replaceState.bind(history);"
        " history.replaceState = (...all) => { window.changes++; own(...all); }; }"
    )
    prompt = page.get_by_label("Prompt", exact=True)
    prompt.fill("")
    prompt.press_sequentially("word " * 40, delay=10)
    expect(prompt).to_have_value("word " * 40)
    page.wait_for_url(lambda url: "word+" * 39 in urllib.parse.unquote(url))
    assert page.evaluate("window.changes") <= 2 + page.evaluate("performance.now()") / 400
    prompt.press_sequentially("last")
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Health").click()  # at once
    page.go_back()
    expect(prompt).to_have_value("word " * 40 + "last")
