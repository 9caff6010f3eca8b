"""`pip install . ./server` installs the services and the client: built, installed into a fresh environment, used."""

import json
import subprocess
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def python(wheel, server_wheel, environment):
    """The Python of an environment with both wheels and the dependencies of the store."""
    return environment(wheel, f"{server_wheel}[store]", f"--constraint={ROOT / 'requirements/store.lock'}")


def run(python, code, tmp_path):
    """Run code isolated from this checkout, and return its JSON output."""
    result = subprocess.run([python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_wheel_holds_the_services_and_needs_the_client_of_its_version(server_wheel):
    archive = zipfile.ZipFile(server_wheel)
    names = archive.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"inference_svc", "store_svc", "svc_common"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (text,) = (archive.read(name) for name in names if name.endswith("/METADATA"))
    about = message_from_bytes(text)
    assert f"residuum=={about['Version']}" in about.get_all("Requires-Dist")
    assert about.get_all("Provides-Extra") == ["archive", "cpu", "cuda", "store"]


def test_vllm_finds_the_plugin_and_the_client_the_command(python, tmp_path):
    code = """
import json
from importlib.metadata import entry_points
groups = ("vllm.general_plugins", "residuum.commands")
print(json.dumps([[e.name, e.value, e.dist.name] for group in groups for e in entry_points(group=group)]))
"""
    assert run(python, code, tmp_path) == [
        ["residuum", "inference_svc.vllm_serve.plugin:register", "residuum-server"],
        ["serve", "svc_common.serve_command", "residuum-server"],
        ["vllm-serve", "inference_svc.vllm_serve.command", "residuum-server"],
    ]


def test_the_store_starts_with_its_extra(python, tmp_path):
    result = subprocess.run(
        [python, "-I", "-m", "store_svc", "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "--retain-hours" in result.stdout


def test_serving_without_vllm_says_what_is_missing(python, tmp_path):
    command = [python.parent / "residuum", "serve", "--model", "m"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("residuum: vllm cannot be imported: install residuum-server (")
    assert list(tmp_path.iterdir()) == []
