"""The page in a real browser: with real services and SmolLM2, and with a real store and a scripted service."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import residuum
from svc_common.launcher import running_services
from tests import one_process, sharing, warm_start
from tests.ui.browser import PROGRAMS, Watched, chromium, serving

MORE = [
    "I am so happy today! Everything is wonderful.",
    "What a beautiful, joyful morning.",
    "We laughed with delight.",
]
LESS = ["I am so sad today. Everything is terrible.", "What a bleak, miserable morning.", "We wept with grief."]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests in one process, which has the engine."""
    sharing.check(items, "services", "ui", Path(__file__).parent)


@pytest.fixture(scope="session")
def browser_path():
    """The path of the browser; skips the tests without one."""
    path = chromium()
    if path is None:
        pytest.skip(f"these tests need a browser: none of {', '.join(PROGRAMS)} is installed (apt install chromium)")
    return path


@pytest.fixture(scope="module")
def browser(browser_path):
    """The browser. It is closed after each file: while it is open, no test can run an event loop of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="these tests need the package playwright")
    with playwright.sync_playwright() as running:
        playwright.expect.set_options(timeout=30_000)  # milliseconds; the machine may be busy
        opened = running.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def services(browser_path, smollm2):
    """(store, inference): SmolLM2 in bfloat16, eager, with room for a sparse autoencoder."""
    with running_services(
        str(smollm2),
        inference_arguments=["--enforce-eager", *one_process.SMALL, "--sae-mib", "16"],
        launch=warm_start.launch,
    ) as both:
        yield both


@pytest.fixture(scope="package")
def client(services):
    with residuum.Client(services[1].endpoint) as opened:
        yield opened


@pytest.fixture(scope="package")
def joy(client):
    """A direction of the real model."""
    what = residuum.Capture(positions="last_prompt")
    sides = [client.generate_many(side, max_tokens=0, capture=what, progress=False) for side in (MORE, LESS)]
    found = residuum.directions.difference_of_means(*(client.activations(side) for side in sides))
    for side in sides:
        client.delete(side)
    return found


@pytest.fixture(scope="package")
def gallery(tmp_path_factory):
    return tmp_path_factory.mktemp("gallery")


@pytest.fixture(scope="package")
def probe(gallery, joy):
    """A probe with two outputs, in the gallery."""
    weights = np.stack([joy[12].values, -joy[12].values]) / joy[12].norm / 20
    found = residuum.Probe(weights, bias=[-0.3, 0.3], layer=12, activation="softmax", output_names=["joy", "grief"])
    found.save(gallery / "feeling.safetensors")
    return found


@pytest.fixture(scope="package")
def sae(gallery, joy):
    """A sparse autoencoder of random features, with joy as feature 7, in the gallery."""
    encoder = np.random.default_rng(0).normal(size=(256, 576)).astype(np.float32) / 24
    encoder[7] = joy[12].values / joy[12].norm
    found = residuum.SAE(encoder, encoder, activation="jumprelu", threshold=1.0)
    residuum.sae.save(found, gallery / "tiny.safetensors")
    return found


@pytest.fixture(scope="package")
def features(client, sae):
    """A capture whose rows are features."""
    what = residuum.Capture(layers=[12], sae=sae)
    prompt = "What a beautiful, joyful morning."
    client.manifest(client.generate(prompt, max_tokens=8, capture=what, request_id="features"), wait=True)
    return "features"


@pytest.fixture(scope="package")
def address(services, gallery, joy, probe, sae):
    """The address of the page for the real services."""
    joy.save(gallery / "joy.safetensors")
    with serving(services[1].endpoint, gallery) as found:
        yield found


@pytest.fixture(scope="package")
def captured(client):
    """Two captures of the real model, with labels."""
    for name, prompt in (("tale", "Once upon a time, in a land far away,"), ("facts", "The capital of France is")):
        what = residuum.Capture(labels={"kind": name, "y": len(name)})
        client.manifest(client.generate(prompt, max_tokens=12, capture=what, request_id=name), wait=True)
    return "tale", "facts"


@pytest.fixture
def scripted(browser_path, tmp_path):
    """A real store and a scripted inference service, which tests may stop and start again."""
    from tests.client.support.peer import RunningPeer
    from tests.client.support.running_store import RunningStore

    store = RunningStore(tmp_path / "store", max_bytes="512MiB")
    peer = RunningPeer(store.endpoint)
    found = Scripted(store, peer, tmp_path)
    yield found
    found.peer.stop()
    if found.store.process.poll() is None:
        found.store.stop()


class Scripted:
    """The services of `scripted`."""

    def __init__(self, store, peer, folder) -> None:
        self.store, self.peer, self.folder = store, peer, folder

    def restart_store(self) -> None:
        from tests.client.support.running_store import RunningStore

        self.store = RunningStore(self.folder / "store", port=self.store.port, max_bytes="512MiB")

    def save_direction(self, width: int = 8, layers: int = 6) -> Path:
        """Return a gallery with one direction."""
        folder = self.folder / "gallery"
        folder.mkdir(exist_ok=True)
        vectors = {layer: np.arange(1, width + 1, dtype=np.float32) for layer in range(layers)}
        residuum.Directions(vectors).save(folder / "joy.safetensors")
        return folder


@pytest.fixture
def visit(browser):
    """Opens pages in new contexts, and checks at the end that nothing bad happened in them."""
    opened = []

    def open_page(address, *, width=1280, scheme="light", **options):
        context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme, **options)
        watched = Watched(context, address)
        opened.append((context, watched))
        return watched

    yield open_page
    for context, _ in opened:
        context.close()
    assert [error for _, watched in opened for error in watched.errors] == []
