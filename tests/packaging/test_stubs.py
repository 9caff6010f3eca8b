"""The committed stubs match protos/, and load with the installed protobuf."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = sorted(path.stem for path in (ROOT / "client/residuum/v1").glob("*_pb2*.py"))


def generate(root, *arguments):
    command = [sys.executable, str(root / "scripts/generate_stubs.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_committed_stubs_are_fresh():
    result = generate(ROOT, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", STUBS)
def test_stub_imports(name):
    importlib.import_module(f"residuum.v1.{name}")


def test_every_proto_has_its_four_stubs():
    protos = {path.stem for path in (ROOT / "protos/residuum/v1").glob("*.proto")}
    endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    expected = {f"{proto}{ending}" for proto in protos for ending in endings}
    assert {path.name for path in (ROOT / "client/residuum/v1").glob("*_pb2*")} == expected


class TestCheckNotices:
    """The freshness check fails for each way in which stubs can be stale, until they are generated again."""

    @pytest.fixture
    def copy(self, tmp_path):
        for folder in ("protos", "client/residuum/v1", "scripts"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        return tmp_path

    @pytest.fixture
    def stubs(self, copy):
        return copy / "client/residuum/v1"

    @staticmethod
    def edited(stubs):
        path = stubs / "tensor_pb2.pyi"
        path.write_text(path.read_text() + "\n# by hand\n")
        return path.name

    @staticmethod
    def missing(stubs):
        (stubs / "tensor_pb2.py").unlink()
        return "tensor_pb2.py"

    @staticmethod
    def left_over(stubs):
        (stubs / "gone_pb2.py").write_text("")
        return "gone_pb2.py"

    @pytest.mark.parametrize("damage", ["edited", "missing", "left_over"])
    def test_a_stale_stub_is_reported_until_it_is_generated(self, copy, stubs, damage):
        name = getattr(self, damage)(stubs)
        stale = generate(copy, "--check")
        assert stale.returncode == 1
        assert name in stale.stderr
        assert generate(copy).returncode == 0
        assert generate(copy, "--check").returncode == 0


def test_buf_lint(tool):
    result = subprocess.run([tool("buf"), "lint", "protos"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
