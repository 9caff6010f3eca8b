"""Take the pictures of `residuum ui` in docs/pictures, with SmolLM2 and Debian's Chromium.

.venv/bin/python scripts/ui_pictures.py                        two views at 1280 pixels, light
.venv/bin/python scripts/ui_pictures.py --all docs/pictures    each view at 1280 and 390 pixels, light and dark
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import residuum  # noqa: E402 - the examples below need the path above
from examples.demo.__main__ import HAPPY, SAD  # noqa: E402
from examples.demo.page import filled_services  # noqa: E402 - it is no part of an installed package
from examples.model import default_model  # noqa: E402 - as above

PHONE = 390
PICTURES = ROOT / "docs" / "pictures"


def _operation(scale: float) -> dict[str, Any]:
    return {"kind": "add", "direction": "joy", "layers": "12", "from": "", "scale": scale, "phase": "all"}


_COLUMNS = [
    {"name": "Unsteered", "canSteer": False, "operations": []},
    {"name": "A", "canSteer": True, "operations": [_operation(2.0)]},
    {"name": "B", "canSteer": True, "operations": [_operation(-2.0)]},
]
VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "captures": ("captures", {}),
    "capture": (
        "capture",
        {"id": "door-happy", "measure": "projection", "direction": "joy", "layer": 16, "position": 20, "each": 1},
    ),
    "probe": ("capture", {"id": "door-plain", "measure": "probe", "from": "all", "layer": 16, "position": 24}),
    "compare": (
        "compare",
        {"a": "door-happy", "b": "door-sad", "measure": "projection", "direction": "joy", "each": 1},
    ),
    "generate": ("generate", {"s": json.dumps({"columns": _COLUMNS, "max_tokens": 40})}),
    "directions": ("directions", {"name": "joy", "layer": 12, "where": "set = demo"}),
    "new-direction": ("directions", {"new": 1}),
    "health": ("health", {}),
}
SHAPES = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
SHOWN = ("capture", "generate")
"""The views that are taken without --all: those whose pictures say most of the page."""


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="take each view at both widths, light and dark, into this folder"
    )
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("There is no chromium. Install it: apt install chromium")
    with (
        filled_services(default_model()) as (endpoint, gallery),
        page_of(endpoint, gallery) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        names, shapes = (SHOWN, SHAPES[:1]) if options.all is None else (tuple(VIEWS), SHAPES)
        for name in names:
            for width, scheme in shapes:
                path = (options.all or PICTURES) / f"ui-{name}-{width}-{scheme}.png"
                shrink(take(browser, address, endpoint, name, path, width, scheme))


def take(browser: Any, address: str, endpoint: str, name: str, path: Path, width: int, scheme: str) -> Path:
    """Open a view, write its picture, and return the picture's path. A phone's picture is what fits its screen."""
    context = browser.new_context(
        viewport={"width": width, "height": 800 if width > PHONE else 844}, color_scheme=scheme
    )
    page = context.new_page()
    page.goto(address)
    page.get_by_role("navigation", name="Views").wait_for()
    view, state = VIEWS[name]
    page.goto(f"{address.partition('?')[0]}#{view}?{urllib.parse.urlencode(state)}")
    finish = PREPARATIONS[name](page, endpoint) if name in PREPARATIONS else None
    page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
    page.wait_for_timeout(1500)  # drawing has no event to wait for
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=path, full_page=width > PHONE)
    if finish:
        finish()
    context.close()
    print(path)
    return path


def _generate(page: Any, _: str) -> None:
    page.get_by_role("button", name="Generate", exact=True).click()
    page.locator(".badge.good").nth(2).wait_for(timeout=120_000)
    page.get_by_role("button", name="Run the sweep").click()
    page.get_by_text("9 of 9 scales").wait_for(state="detached", timeout=120_000)
    page.get_by_role("region", name="Dose and response").get_by_role("row").nth(9).wait_for(timeout=120_000)


def _prompts(page: Any, _: str) -> None:
    page.get_by_label("More of this").fill("\n".join(HAPPY))
    page.get_by_label("Less of this").fill("\n".join(SAD))
    page.get_by_role("form", name="New direction from prompts").get_by_label("Name").fill("mood")


def _search(page: Any, _: str) -> None:
    page.get_by_role("button", name="Search").click()
    page.get_by_role("region", name="Search").get_by_role("row").nth(1).wait_for(timeout=60_000)


def _work(page: Any, endpoint: str) -> Callable[[], None]:
    """Let the service work, so that its health shows what it does. Return what waits until it has done the work."""
    client, pool = residuum.Client(endpoint), ThreadPoolExecutor(1)
    work = pool.submit(client.generate_many, ["Once upon a time"] * 4, max_tokens=600, progress=False)
    page.wait_for_timeout(11_000)  # four measurements of the throughput

    def finish() -> None:
        work.result()
        pool.shutdown()
        client.close()

    return finish


PREPARATIONS: dict[str, Callable[[Any, str], Callable[[], None] | None]] = {
    "generate": _generate,
    "new-direction": _prompts,
    "directions": _search,
    "health": _work,
}
"""What is done in a view before its picture is taken, with the page and the service's endpoint. It may return what
is to be done afterwards."""


def shrink(path: Path) -> None:
    """Write a picture again with 256 colours: half the size, and nobody sees the difference."""
    from PIL import Image

    with Image.open(path) as picture:
        # The default method merges rare colours, such as the blue ones of a heat map, with grey. Without kmeans, this
        # one gives grey a tint.
        small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1)
    small.save(path, optimize=True)


@contextmanager
def page_of(endpoint: str, gallery: Path) -> Iterator[str]:
    """Run `residuum ui`, and yield its address."""
    command = [sys.executable, "-m", "residuum", "ui", "--endpoint", endpoint, "--port", "0", "--json"]
    with subprocess.Popen([*command, "--gallery", str(gallery)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101 - for mypy
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
