"""Functions of the page's JavaScript, run by node. Their files must not import others."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
from pathlib import Path

import pytest

import residuum.ui

FOLDER = Path(residuum.ui.__file__).parent / "static/js"


def called(path, function, *arguments):
    """Return the text that a function of a file returns; skips the test without node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("this test runs the page's JavaScript: node is not installed")
    module = f"data:text/javascript,{urllib.parse.quote((FOLDER / path).read_text())}"
    given = ", ".join(map(json.dumps, arguments))
    script = f"import({json.dumps(module)}).then((all) => process.stdout.write(all.{function}({given})))"
    return subprocess.run([node, "-e", script], capture_output=True, text=True, check=True, timeout=60).stdout
