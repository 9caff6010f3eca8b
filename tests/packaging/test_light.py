"""`--light` skips tests that need torch or vLLM if these are missing. Without the flag, such tests fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = "raise ModuleNotFoundError(\"No module named 'vllm'\", name='vllm.sampling_params')\n"


@pytest.mark.parametrize(("flags", "code", "words"), [(["--light"], 0, "1 passed, 2 skipped"), ([], 2, "1 error")])
def test_tests_without_their_modules_are_skipped_only_with_the_flag(flags, code, words, tmp_path):
    (tmp_path / "test_imports.py").write_text(MISSING)
    (tmp_path / "test_inside.py").write_text(f"def test_a():\n    {MISSING}\ndef test_b():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.light", *flags, str(tmp_path)]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert words in ran.stdout


def test_a_module_of_ours_that_is_missing_is_never_skipped(tmp_path):
    (tmp_path / "test_imports.py").write_text("import inference_svc.no_such_module\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.light", "--light", str(tmp_path)]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2, ran.stdout + ran.stderr
