"""The Python code that the page shows. It does what the page does."""

import json
import shutil
import subprocess
import urllib.parse
from pathlib import Path

import pytest

import residuum.ui

SOURCE = Path(residuum.ui.__file__).parent / "static/js/core/python.js"


def written(function, argument):
    """Return what a function of the page's file writes."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("this test runs the page's JavaScript: node is not installed")
    module = f"data:text/javascript,{urllib.parse.quote(SOURCE.read_text())}"
    script = f"import({json.dumps(module)}).then((all) => console.log(all.{function}({json.dumps(argument)})))"
    return subprocess.run([node, "-e", script], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("positions", ["last_prompt", "prompt"])
def test_a_direction_is_of_the_rows_that_the_form_names(positions):
    form = {"name": "joy", "method": "difference_of_means", "positions": positions, "chat": ""}
    given = {"positive": ["a"], "negative": ["b"]}
    code = written("makeCode", {"form": form, "given": given, "about": {}})
    compile(code, "the page's code", "exec")
    (line,) = (line for line in code.splitlines() if line.startswith("direction = "))
    assert line.endswith(f'positions="{positions}")')
