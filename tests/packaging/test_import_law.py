"""The import rules between packages, checked by import-linter and by searches in the sources."""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def files_that_import(module, *folders):
    statement = re.compile(rf"^\s*(import|from)\s+{module}\b", re.MULTILINE)
    return [str(path.relative_to(ROOT)) for path in sources(*folders) if statement.search(path.read_text())]


def test_import_linter_keeps_every_contract(tool):
    result = subprocess.run(
        [tool("lint-imports"), "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("client/residuum/__init__.py", "import torch"),
        ("client/residuum/__init__.py", "import svc_common.rpc.serving"),
        ("client/residuum/directions/__init__.py", "import residuum.ui.gallery"),
        ("client/residuum/exports/__init__.py", "import residuum.captures.row_stream"),
        ("client/residuum/cli/__init__.py", "import starlette.applications"),
        ("client/residuum/protocol/__init__.py", "import residuum.transport.failures"),
        ("client/residuum/protocol/__init__.py", "import grpc"),
        ("client/residuum/rpc/channels.py", "import residuum.exceptions"),
        ("client/residuum/values/__init__.py", "import residuum.protocol.requests"),
        ("client/residuum/values/__init__.py", "import asyncio"),
        ("client/residuum/values/selections/__init__.py", "import residuum.values.steering.gates"),
        ("client/residuum/v1/__init__.py", "import residuum.wire.limits"),
        ("client/residuum/wire/__init__.py", "import grpc"),
        ("client/residuum/wire/__init__.py", "import residuum.rpc.errors"),
        ("inference_svc/__init__.py", "import lmdb"),
        ("inference_svc/__init__.py", "import store_svc"),
        ("inference_svc/__init__.py", "from residuum import Client"),
        ("inference_svc/admission/__init__.py", "import inference_svc.engine.facts"),
        ("inference_svc/shipping/__init__.py", "import inference_svc.taps.plan"),
        ("store_svc/__init__.py", "import residuum.exceptions"),
        ("store_svc/__init__.py", "import vllm"),
        ("svc_common/__init__.py", "import inference_svc.settings"),
        ("svc_common/__init__.py", "import residuum.exceptions"),
        ("svc_common/__init__.py", "import store_svc.settings"),
        ("svc_common/__init__.py", "import torch"),
    ],
)
def test_import_linter_detects_each_breach(file, statement, tool, tmp_path):
    """import-linter detects a breach of each contract in a changed copy, so each contract has an effect."""
    for folder in ("client", "inference_svc", "store_svc", "svc_common"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a") as source:
        source.write(f"\n\ndef late():\n    {statement}\n")
    result = subprocess.run(
        [tool("lint-imports"), "--no-logo", "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'client'}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("module", ["torch", "vllm", "transformers"])
def test_client_and_store_never_name_a_heavy_library(module):
    """Stricter than import-linter: no imports in functions or behind TYPE_CHECKING, except in what is for torch."""
    training = [f"client/residuum/training/{name}.py" for name in ("__init__", "adapters", "batches", "sparsify")]
    allowed = ["client/residuum/torch.py", *training] if module == "torch" else []
    assert files_that_import(module, "client", "store_svc", "svc_common") == allowed


def test_nothing_imports_the_module_that_needs_torch():
    assert files_that_import("residuum.torch", "client", "store_svc", "inference_svc", "svc_common") == []


def test_only_one_file_imports_lmdb():
    found = files_that_import("lmdb", "client", "inference_svc", "store_svc", "svc_common")
    assert len(found) == 1, found
    assert found[0].startswith("store_svc/")


def test_only_known_files_name_async_llm():
    found = [str(path.relative_to(ROOT)) for path in sources("inference_svc") if "AsyncLLM" in code_of(path)]
    assert found == [
        "inference_svc/engine/engine.py",
        "inference_svc/engine/replicas.py",
        "inference_svc/engine/streams.py",
        "inference_svc/vllm_serve/plugin.py",
    ]


def code_of(path):
    """Return a file's text without comments and docstrings, which may mention AsyncLLM."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.unparse(tree)
