"""A service that a test starts as a fork is like one that was folder as a program (tests/warm_start.py)."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests import warm_start

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

PROGRAM = """
import json, multiprocessing, os, sys, time

def facts():
    imported = "vllm.v1.engine.core" in sys.modules
    compiles = not sys.modules["torch._dynamo.config"].disable
    return [sys.argv, os.getcwd(), os.environ["TOLD"], os.getpgid(0), imported, compiles]

def tell(answers):
    answers.put([*facts(), os.getpid(), ran])

ran = __name__
if __name__ == "__main__":
    if "wait" in sys.argv:
        time.sleep(600)
    own = facts()
    os.environ["TOLD"] += " and the engine"
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=tell, args=(answers,))
    process.start()
    print(json.dumps([own, answers.get(timeout=60), process.pid]), flush=True)
    process.join()
    sys.exit(7 + process.exitcode)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module `told` and an empty log."""
    (tmp_path / "told.py").write_text(PROGRAM)
    (tmp_path / "log").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TOLD", "the service")
    return tmp_path


@pytest.mark.parametrize("compiles", [False, True])
def test_it_has_its_own_environment_folder_group_and_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, compiles: bool
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0" if compiles else "1")
    process = warm_start.launch("told", ["--flag", "a b"], folder, folder / "log")
    assert process.wait(200) == process.poll() == process.returncode == 7
    service, (*engine, pid, ran), known = json.loads((folder / "log").read_text().splitlines()[-1])
    argv = [str(folder / "told.py"), "--flag", "a b"]
    assert service == [argv, str(folder), "the service", process.pid, True, compiles]
    assert engine == [argv, str(folder), "the service and the engine", process.pid, True, compiles]
    assert pid == known not in {process.pid, os.getpid()}
    assert ran == "__mp_main__", "as in a spawned process"
    assert os.environ["TOLD"] == "the service"


def test_signals_reach_it(folder: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = warm_start.launch("told", ["wait"], folder, folder / "log")
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(100) == -number
        process.send_signal(number)  # nobody gets it
