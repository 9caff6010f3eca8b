"""The kernels compile to machine code for a GPU, which fits its registers. This needs no GPU and runs nothing on one.

ptxas has computed wrong addresses in a kernel that spilled registers (see `chunked_kernels`).
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inference_svc.taps.gpu import chunked_kernels, encoding_kernels, kernel, score_copies  # noqa: E402, score_copies

CAPABILITY = 90
OTHERS = (80, 89, 100)
"""Other GPUs, for which the kernels that fill the registers are compiled, too."""
VERSION = ".".join(triton.__version__.split(".")[:2])
SPILLS = {
    "3.6": {("tap and norm, 4096 in registers", 90): 8},
    "3.7": {("tap and norm, 4096 in registers", 90): 16, ("tap and norm, 4096 in registers", 100): 8},
}
"""Bytes that a kernel may spill and load again, by the version of Triton, the kernel and the GPU; 0 for all others.

These versions, of vLLM 0.24 and 0.32, need one or two registers more than the limit of 128, which 3.9 needs to spill
none. With another limit, an H100 would hold fewer rows at once. It computed the right rows with these spills.
"""
BARRIERS = {"3.6": 32, "3.7": 32}.get(VERSION, 21)
"""Most barriers of the tap with a norm: two for each of its ten inner products, and one.

Before 3.9, Triton makes threads wait three times in a sum across them, and once more at its end.
"""
CHUNKS = {"CHUNK": encoding_kernels._CHUNK}
BYTES = {"target": "*u8"}
TYPES = {
    **dict.fromkeys(("hidden", "residual", "pool", "copy", "source", "weight", "normed", "summed"), "*bf16"),
    **dict.fromkeys(("row_table", "lines", "entries"), "*i32"),
    **dict.fromkeys(("bank", "inverse_norms", "scores", "scratch", "vectors"), "*fp32"),
    **dict.fromkeys(("max_abs", "factor", "epsilon"), "fp32"),
    "bits": "*i16",
}
# Each kernel, the types of its arguments beyond TYPES, and its constants.
KERNELS = {
    "tap, row in chunks": (
        chunked_kernels._tap_kernel,
        {},
        {"HAS_RESIDUAL": True, "CHUNK": chunked_kernels._CHUNK},
    ),
    "tap a copy": (chunked_kernels._tap_copy_kernel, {}, {"CHUNK": chunked_kernels._CHUNK}),
    "tap experts": (
        chunked_kernels._tap_experts_kernel,
        {"weights": "*fp32", "experts": "*i32", "scale": "fp32"},
        {"CHUNK": 512},
    ),
    "copies of scores": (
        score_copies._copy_kernel,
        {"buffer": "*fp32", "board": "*fp32", "table": "*i64"},
        {"ROWS": score_copies._ROWS},
    ),
    "quantised rows": (encoding_kernels._quantize_rows_kernel, BYTES, CHUNKS),
    "quantised columns": (encoding_kernels._quantize_columns_kernel, BYTES, {"COLUMNS": 128}),
    "largest, quantised": (encoding_kernels._keep_largest_kernel, BYTES, {"BITS": 16, "QUANTIZE": True, **CHUNKS}),
    "largest": (encoding_kernels._keep_largest_kernel, BYTES, {"BITS": 16, "QUANTIZE": False, **CHUNKS}),
    "inner products": (
        encoding_kernels._inner_products_kernel,
        {"target": "*fp32"},
        {"ROWS": 32, "VECTORS": 16, "WIDTH": 64, "element_step": 1},
    ),
    "inner products with 16-bit vectors": (
        encoding_kernels._inner_products_kernel,
        {"target": "*fp32", "vectors": "*bf16"},
        {"ROWS": 32, "VECTORS": 16, "WIDTH": 64, "element_step": 1},
    ),
    "inner products with signs": (
        encoding_kernels._inner_products_kernel,
        {"target": "*fp32", "source": "*fp32"},
        {"ROWS": 32, "VECTORS": 16, "WIDTH": 64, "vector_step": 1},
    ),
    "casts to float32": (kernel._copy_kernel, {"target": "*fp32"}, CHUNKS),
    "casts to float16": (kernel._copy_kernel, {"target": "*fp16"}, CHUNKS),
}

for width in (1536, 2560, 4096, 5120, 6144, 8192):
    head_and_tail = dict(zip(("HEAD", "TAIL"), kernel._split(width), strict=True))
    KERNELS |= {
        f"tap, {width} in registers": (kernel._tap_kernel, {}, {"HAS_RESIDUAL": True, **head_and_tail}),
        f"tap without residual, {width} in registers": (
            kernel._tap_kernel,
            {},
            {"HAS_RESIDUAL": False, **head_and_tail},
        ),
        f"tap and norm, {width} in registers": (kernel._tap_norm_kernel, {}, {"PLUS_ONE": 0.0, **head_and_tail}),
    }

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def compiled(name, capability=CAPABILITY):
    function, types, constants = KERNELS[name]
    types = TYPES | types
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in function.arg_names
    }
    # Triton compiles for tensors and widths that are multiples of 16, because those of models are.
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, argument in enumerate(function.arg_names)
        if signature[argument].startswith("*") or argument in {"width", "hidden_stride", "residual_stride"}
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 8}
    if "HEAD" in constants:  # as the kernels are launched
        size = constants["HEAD"], constants["TAIL"]
        options = {
            "num_warps": kernel._warps(*size),
            "maxnreg": kernel._registers(function, sum(size), divmod(capability, 10)),
        }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *((name, CAPABILITY) for name in KERNELS),
        *((name, other) for other in OTHERS for name in KERNELS if name.endswith("in registers")),
    ],
)
def test_a_kernel_compiles_and_spills_no_registers(name, capability, tmp_path):
    code = tmp_path / "kernel.ptx"
    code.write_text(compiled(name, capability)["ptx"])
    gpu = f"sm_{capability}{'a' if capability >= 90 else ''}"
    done = subprocess.run(
        [get_ptxas(capability).path, "-v", f"--gpu-name={gpu}", code, "-o", tmp_path / "kernel.cubin"],
        check=True,
        capture_output=True,
        text=True,
    )
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    assert spilled, done.stderr
    assert sum(map(int, spilled)) <= SPILLS.get(VERSION, {}).get((name, capability), 0), done.stderr


def test_quantised_numbers_are_divided_and_rounded_exactly():
    """No approximate division, and subnormal numbers are not flushed to zero: the reference in numpy does neither."""
    ptx = compiled("quantised rows")["ptx"]
    assert "div.rn.f32" in ptx
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert "div.full" not in ptx


@pytest.mark.parametrize("width", [1536, 2560, 4096, 5120])
def test_an_inner_product_has_one_sum_across_threads(width):
    """Also if a row has a tail."""
    assert compiled(f"tap and norm, {width} in registers")["ptx"].count("bar.sync") <= BARRIERS


@pytest.mark.parametrize("name", ["tap", "tap without residual"])
def test_threads_wait_for_each_other_before_a_steered_row_is_loaded_again(name):
    """For each of a row's two destinations. If rows are not aligned, other threads load an element than stored it."""
    assert compiled(f"{name}, 2560 in registers")["ttir"].count(".barrier") == 2


@pytest.mark.parametrize("file", sorted(Path(kernel.__file__).parent.glob("*.py")), ids=lambda file: file.name)
def test_a_constant_has_no_plain_text_as_its_default(file):
    """Triton 3.6, which vLLM 0.24 requires, compiles no kernel that calls such a function; newer versions do."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(item) for item in node.decorator_list):
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            assert not any(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in defaults), (
                node.name
            )
