"""The GPU's encoders compile to machine code for a GPU. Nothing here runs that code."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from inference_svc.taps.gpu import encoding_kernels, kernel

HOPPER = GPUTarget("cuda", 90, 32)
SIZES = dict.fromkeys(("positions", "capacity", "width", "count", "rows", "unit_bytes"), "i32")
CASES = {
    "quantised rows": (encoding_kernels._quantize_rows_kernel, {"target": "*u8", "factor": "fp32"}, {"BLOCK": 2048}),
    "quantised columns": (encoding_kernels._quantize_columns_kernel, {"target": "*u8"}, {"COLUMNS": 128}),
    "largest, quantised": (
        encoding_kernels._keep_largest_kernel,
        {"target": "*u8", "bits": "*i16"},
        {"BITS": 16, "QUANTIZE": True, "BLOCK": 512},
    ),
    "largest": (
        encoding_kernels._keep_largest_kernel,
        {"target": "*u8", "bits": "*i16"},
        {"BITS": 16, "QUANTIZE": False, "BLOCK": 512},
    ),
    "inner products": (
        encoding_kernels._inner_products_kernel,
        {"target": "*fp32", "vectors": "*fp32"},
        {"ROWS": 32, "VECTORS": 16, "WIDTH": 64},
    ),
    "casts to float32": (kernel._copy_kernel, {"target": "*fp32"}, {"CHUNK": 4096}),
    "casts to float16": (kernel._copy_kernel, {"target": "*fp16"}, {"CHUNK": 4096}),
}


def compiled(function, types, constants):
    types = {**SIZES, **dict.fromkeys(("units", "unit_elements", "unit_stride"), "i32"), "source": "*bf16", **types}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(function, signature, places), target=HOPPER, options={"num_warps": 4}).asm


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_compiles(name):
    assert compiled(*CASES[name])["cubin"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_quantised_numbers_are_divided_and_rounded_exactly():
    """No approximate division, and subnormal numbers are not flushed to zero: the reference in numpy does neither."""
    ptx = compiled(*CASES["quantised rows"])["ptx"]
    assert "div.rn.f32" in ptx
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert "div.full" not in ptx
