"""The GPU's kernels for wide rows fit a GPU's registers: they are compiled for one, which needs none.

ptxas has computed wrong addresses in a kernel that spilled registers (see `chunked_kernels`).
"""

from __future__ import annotations

import re
import subprocess

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inference_svc.taps.gpu import chunked_kernels, encoding_kernels, kernel  # noqa: E402

CAPABILITY = 90
TABLES = {
    "row_table": "*i32",
    "lines": "*i32",
    "entries": "*i32",
    "bank": "*fp32",
    "inverse_norms": "*fp32",
    "max_abs": "fp32",
}
KERNELS = {
    "steering in registers": (
        kernel._tap_kernel,
        TABLES,
        {"HAS_RESIDUAL": True, "HEAD": 8192, "TAIL": 0},
    ),
    "steering in chunks": (
        chunked_kernels._tap_kernel,
        TABLES | {"scratch": "*fp32"},
        {"HAS_RESIDUAL": True, "CHUNK": chunked_kernels._CHUNK},
    ),
    "capturing": (
        chunked_kernels._tap_copy_kernel,
        TABLES,
        {"CHUNK": chunked_kernels._CHUNK},
    ),
    "quantising": (
        encoding_kernels._quantize_rows_kernel,
        {"target": "*u8", "factor": "fp32"},
        {"CHUNK": encoding_kernels._CHUNK},
    ),
    "keeping the largest": (
        encoding_kernels._keep_largest_kernel,
        {"target": "*u8", "bits": "*i16"},
        {"BITS": 16, "QUANTIZE": True, "CHUNK": encoding_kernels._CHUNK},
    ),
}
ROWS = {"hidden", "residual", "pool", "copy", "source"}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_spill_no_registers(name, tmp_path):
    function, types, constants = KERNELS[name]
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "*bf16" if argument in ROWS else "i32")
        for argument in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": 8})
    code = tmp_path / "kernel.ptx"
    code.write_text(compiled.asm["ptx"])
    done = subprocess.run(
        [get_ptxas(CAPABILITY).path, "-v", f"--gpu-name=sm_{CAPABILITY}a", code, "-o", tmp_path / "kernel.cubin"],
        check=True,
        capture_output=True,
        text=True,
    )
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    assert spilled, done.stderr
    assert not any(map(int, spilled)), done.stderr
