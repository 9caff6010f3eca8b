"""The GPU's kernels agree with the CPU's tap, as far as this can be tested without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from svc_common.launcher import ROOT

BOUNDS = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_kernel_agrees_with_the_cpu_and_its_steering_with_float64(dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.taps.gpu.kernels.interpreted_kernel", dtype],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=250,
    )
    for what, worst in json.loads(done.stdout).items():
        assert max(worst) < BOUNDS[dtype], f"{what}: more than two roundings apart: {worst}"
