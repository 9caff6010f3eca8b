"""The committed synchronous client equals the output of scripts/generate_sync.py."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GITATTRIBUTES = ROOT / ".gitattributes"


def generate(root, *arguments):
    command = [sys.executable, str(root / "scripts/generate_sync.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_committed_client_is_fresh():
    result = generate(ROOT, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def copy(tmp_path):
    for folder in ("client/residuum/_async", "client/residuum/_sync", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def edit_what_is_generated(root):
    path = root / "client/residuum/_sync/client.py"
    path.write_text(path.read_text() + "\n# by hand\n")
    return path.name


def edit_a_source(root):
    path = root / "client/residuum/_async/tokens.py"
    path.write_text(path.read_text() + "\n\nasync def late() -> None:\n    await late()\n")
    return path.name


def remove_what_is_generated(root):
    (root / "client/residuum/_sync/captures.py").unlink()
    return "captures.py"


def leave_something_over(root):
    generated = (root / "client/residuum/_sync/client.py").read_text()
    (root / "client/residuum/_sync/gone.py").write_text(generated)
    return "gone.py"


@pytest.mark.parametrize(
    "damage", [edit_what_is_generated, edit_a_source, remove_what_is_generated, leave_something_over]
)
def test_a_stale_module_is_named_then_cured(copy, damage):
    name = damage(copy)
    stale = generate(copy, "--check")
    assert stale.returncode == 1
    assert name in stale.stderr
    assert generate(copy).returncode == 0
    assert generate(copy, "--check").returncode == 0


def test_a_sentence_that_is_not_found_is_an_error(copy):
    path = copy / "client/residuum/_async/generation.py"
    path.write_text(path.read_text().replace("Cancelling the task stops the request.", ""))
    result = generate(copy, "--check")
    assert result.returncode == 1
    assert "Cancelling the task" in result.stderr


def generated():
    modules = sorted((ROOT / "client/residuum/_sync").glob("*.py"))
    return [path for path in modules if path.read_text().startswith("# Generated from")]


@pytest.mark.parametrize("path", generated(), ids=lambda path: path.name)
def test_nothing_asynchronous_is_left(path):
    text = path.read_text().partition("\n")[2]
    for word in ("await", "async", "aio", "Async", "aclos", "anext", "coroutine", "task"):
        assert word not in text, word


def test_reviews_collapse_exactly_what_is_generated():
    marked = re.findall(
        r"^client/residuum/_sync/(\S+) linguist-generated=true$", GITATTRIBUTES.read_text(), re.MULTILINE
    )
    assert marked == [path.name for path in generated()]
