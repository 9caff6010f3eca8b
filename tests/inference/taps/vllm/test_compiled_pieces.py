"""vLLM compiles layers with the same code once, also with taps. Otherwise an engine needs twice as long to start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from svc_common.launcher import ROOT
from tests import warm_start

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < (2, 11), reason="PyTorch has no arguments that the compiler lifts"),
]


MODULE = "tests.inference.taps.vllm.compiled_pieces"


def checked(output: str) -> dict[str, Any]:
    """Return what the module found, after a check that each tap saw the right rows."""
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    numbers, sums = zip(*found["compiled"], strict=True)
    numbers_eager, sums_eager = zip(*found["eager"], strict=True)
    assert numbers == numbers_eager == tuple(range(found["layers"])), "each point once, in the order of the layers"
    assert sums == pytest.approx(sums_eager, rel=1e-6)
    return found


def compile_pieces(folder: Path) -> dict[str, Any]:
    """Compile in a fork of a process that has imported vLLM, with vLLM's cache in a folder."""
    log = folder / "log"
    log.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))
        process = warm_start.launch(MODULE, [], ROOT, log)
    assert process.wait() == 0, log.read_text()
    return checked(log.read_text())


def test_layers_with_the_same_code_share_a_compiled_piece(tmp_path: Path) -> None:
    found = compile_pieces(tmp_path)
    assert found["pieces"] == found["layers"] + 1
    assert found["different"] == 4, "those before the first two attentions, the one after the last, and all others"
    assert compile_pieces(tmp_path)["loaded"] == 4, "pieces from the cache get their own points"


def test_without_lifted_arguments_each_layer_has_a_piece(tmp_path: Path) -> None:
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path), "VLLM_USE_LAYERNAME": "0"}  # read on import
    command = [sys.executable, "-m", MODULE]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = checked(done.stdout)
    assert found["different"] == found["pieces"] == found["layers"] + 1
