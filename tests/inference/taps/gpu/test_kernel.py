"""The GPU's kernels agree with the CPU's tap, as far as this can be tested without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from svc_common.launcher import ROOT


@pytest.mark.slow
def test_the_kernel_agrees_with_the_cpu_and_its_steering_with_float64() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.taps.gpu.interpreted_kernel"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=250,
    )
    differences = json.loads(done.stdout)
    for case, worst in differences.items():
        bound = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}[case.split()[0]]
        assert max(worst) < bound, f"{case}: more than two roundings apart: {worst}"
