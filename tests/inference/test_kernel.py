"""The GPU's kernel does what the CPU's tap does, as far as it can be told without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

from examples.services import ROOT


def test_the_kernel_agrees_with_the_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.interpreted_kernel"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    differences = json.loads(done.stdout)
    for case, worst in differences.items():
        assert max(worst) < (1e-6 if "float32" in case else 2**-6), f"{case}: two roundings apart, at the most"
