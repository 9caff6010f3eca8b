"""Take the pictures of `residuum ui` in docs/pictures, with SmolLM2 and Debian's Chromium.

.venv/bin/python scripts/ui_pictures.py                    the pictures that the documentation shows
.venv/bin/python scripts/ui_pictures.py --all FOLDER       each view at 1280 and 390 pixels, light and dark, to look at
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.demo.page import filled_services  # noqa: E402 - it is no part of an installed package
from examples.model import default_model  # noqa: E402 - as above

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
    "compare": (
        "compare",
        {"a": "door-happy", "b": "door-sad", "measure": "projection", "direction": "joy", "each": 1},
    ),
    "generate": ("generate", {"s": json.dumps({"columns": _COLUMNS, "max_tokens": 40})}),
    "directions": ("directions", {"name": "joy", "layer": 12}),
    "new-direction": ("directions", {"new": 1}),
    "health": ("health", {}),
}
SHOWN = ("capture", "generate")
"""The views whose pictures the documentation shows, at 1280 pixels and light."""


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="take all of them into this folder")
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
        if options.all is None:
            for name in SHOWN:
                shrink(take(browser, address, name, PICTURES / f"ui-{name}.png", 1280, "light"))
            return
        for name in VIEWS:
            for width in (1280, 390):
                for scheme in ("light", "dark"):
                    take(browser, address, name, options.all / f"{name}-{width}-{scheme}.png", width, scheme)


def take(browser: Any, address: str, name: str, path: Path, width: int, scheme: str) -> Path:
    """Open a view, write its picture, and return the picture's path."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    page.get_by_role("navigation", name="Views").wait_for()
    view, state = VIEWS[name]
    page.goto(f"{address.partition('?')[0]}#{view}?{urllib.parse.urlencode(state)}")
    if view == "generate":
        page.get_by_role("button", name="Generate", exact=True).click()
        page.locator(".badge.good").nth(2).wait_for(timeout=120_000)
    page.wait_for_timeout(1500)  # drawing has no event to wait for
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=path, full_page=True)
    context.close()
    print(path)
    return path


def shrink(path: Path) -> None:
    """Write a picture again with 256 colours: half the size, and nobody sees the difference."""
    from PIL import Image

    with Image.open(path) as picture:
        # The default method merges rare colours, such as the blue ones of a heat map, with grey.
        small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
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
