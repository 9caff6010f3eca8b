"""The kernels compile to machine code for a GPU, which fits its registers. This needs no GPU and runs nothing on one.

ptxas has computed wrong addresses in a kernel that spilled registers (see `kernels.chunked`).
"""

from __future__ import annotations

import ast
import io
import os
import re
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inference_svc.taps.gpu import score_copies  # noqa: E402
from inference_svc.taps.gpu.kernels import chunked, encodings, features, resident, resident_rows  # noqa: E402
from inference_svc.taps.gpu.kernels.resident_norm import tap_norm_kernel  # noqa: E402
from inference_svc.taps.gpu.kernels.resident_tap import tap_kernel  # noqa: E402

CAPABILITY = 90
OTHERS = (80, 89, 100)
"""Other GPUs, for which the kernels that fill the registers are compiled, too."""
IS_COMPLETE = os.environ.get("RESIDUUM_TEST_KERNELS") == "all"
"""Whether all of these are compiled for each GPU and dtype (`make test-triton`). Each compilation takes seconds."""
ROWS = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
"""The dtypes of rows, by their names in Triton."""
VERSION = ".".join(triton.__version__.split(".")[:2])
BARRIERS = {"3.6": 32, "3.7": 32}.get(VERSION, 21)
"""Most barriers of the tap with a norm: two for each of its ten inner products, and one.

Before 3.9, Triton makes threads wait three times in a sum across them, and once more at its end.
"""
SPILLED_BYTES = {("3.9", "largest", 90): 4}
"""Exceptions: the bytes that a kernel spills. On GPUs, no supported vLLM requires Triton 3.9. And the kernel needs far
fewer than 255 registers; code was wrong only for kernels that need more."""
CHUNKS = {"CHUNK": encodings._CHUNK}
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
        chunked._tap_kernel,
        {},
        {"HAS_RESIDUAL": True, "CHUNK": chunked._CHUNK},
    ),
    "tap a copy": (chunked._tap_copy_kernel, {}, {"CHUNK": chunked._CHUNK}),
    "tap experts": (
        chunked._tap_experts_kernel,
        {"weights": "*fp32", "experts": "*i32", "scale": "fp32"},
        {"CHUNK": 512},
    ),
    "copies of scores": (
        score_copies._copy_kernel,
        {"buffer": "*fp32", "board": "*fp32", "table": "*i64"},
        {"ROWS": score_copies._ROWS},
    ),
    "quantised rows": (encodings._quantize_rows_kernel, BYTES, CHUNKS),
    "quantised columns": (encodings._quantize_columns_kernel, BYTES, {"COLUMNS": 128}),
    "largest, quantised": (encodings._keep_largest_kernel, BYTES, {"BITS": 16, "QUANTIZE": True, **CHUNKS}),
    "largest": (encodings._keep_largest_kernel, BYTES, {"BITS": 16, "QUANTIZE": False, **CHUNKS}),
    **{
        f"strongest features{name}": (
            features._keep_strongest_kernel,
            {
                "outputs": "*fp32",
                "keys": "*i32",
                "biases": "*fp32",
                "thresholds": "*fp32",
                "candidates": "*i32",
                "target": "*i32",
            },
            {
                "HAS_THRESHOLD": has_threshold,
                "CHUNK": features._CHUNK,
                "FEW": features._FEW,
                "RANKED": features._RANKED,
                "COMPARED": features._COMPARED,
            },
        )
        for name, has_threshold in ((", with thresholds", True), ("", False))
    },
    "inner products": (
        encodings._inner_products_kernel,
        {"target": "*fp32"},
        {"ROWS": 32, "VECTORS": 16, "WIDTH": 64, "element_step": 1},
    ),
    "inner products with 16-bit vectors": (
        encodings._inner_products_kernel,
        {"target": "*fp32", "vectors": "*bf16"},
        {"ROWS": 32, "VECTORS": 16, "WIDTH": 64, "element_step": 1},
    ),
    "inner products with signs": (
        encodings._inner_products_kernel,
        {"target": "*fp32", "source": "*fp32"},
        {"ROWS": 32, "VECTORS": 16, "WIDTH": 64, "vector_step": 1},
    ),
}

for width in (1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192):
    head, tail = resident_rows.split(width)
    sizes = {"WIDTH": width, "HEAD": head, "TAIL": tail}
    KERNELS |= {
        f"tap, {width} in registers": (tap_kernel, {}, {"HAS_RESIDUAL": True, **sizes}),
        f"tap without residual, {width} in registers": (
            tap_kernel,
            {},
            {"HAS_RESIDUAL": False, **sizes},
        ),
        f"tap and norm, {width} in registers": (
            tap_norm_kernel,
            {},
            {"PLUS_ONE": 0.0, "MULTIPROCESSORS": 132, **sizes},
        ),
    }

LIMITED = [
    name
    for name, (function, _, constants) in KERNELS.items()
    if constants.get("WIDTH") in resident._REGISTERS.get((function, constants.get("HAS_RESIDUAL", True)), {})
]
"""The kernels whose registers are limited for some rows."""
RESIDENT = [name for name in KERNELS if name.endswith("in registers")]
WIDEST = [name for name in RESIDENT if "8192" in name]

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@cache
def compiled(name, capability=CAPABILITY, rows="*bf16"):
    """Return a kernel's code in all forms, and what the assembler said. Each compilation takes seconds."""
    function, types, constants = KERNELS[name]
    types = {argument: rows if kind == "*bf16" else kind for argument, kind in (TYPES | types).items()}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in function.arg_names
    }
    # Triton compiles for tensors and widths that are multiples of 16, because those of models are.
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, argument in enumerate(function.arg_names)
        if not function.params[at].do_not_specialize
        and (signature[argument].startswith("*") or argument in {"width", "hidden_stride", "residual_stride"})
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 8}
    if "HEAD" in constants:
        has_residual = constants.get("HAS_RESIDUAL", True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resident, "_generation", lambda device: device)
            options = resident._options.__wrapped__(  # as it is launched
                function, constants["WIDTH"], ROWS[rows], capability // 10, has_residual=has_residual
            )
    target, said = GPUTarget("cuda", capability, 32), io.StringIO()
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(triton.knobs.cache, "dir", folder),  # so that the assembler runs
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
        redirect_stdout(said),
    ):
        return triton.compile(source, target=target, options=options).asm, said.getvalue()


@pytest.mark.parametrize(
    ("name", "capability", "rows"),
    [
        *((name, CAPABILITY, "*bf16") for name in KERNELS),
        *(
            (name, other, "*bf16")
            for other in (OTHERS if IS_COMPLETE else (80, 100))  # the registers of 89 are those of 80
            for name in (RESIDENT if IS_COMPLETE else [*LIMITED, *WIDEST])
        ),
        *(
            (name, CAPABILITY, rows)
            for rows in ("*fp16", "*fp32")
            for name in (RESIDENT if IS_COMPLETE else LIMITED)
            if name.endswith(("2560 in registers", "4096 in registers"))
        ),
    ],
)
def test_a_kernel_compiles_and_spills_no_registers(name, capability, rows):
    _, log = compiled(name, capability, rows)
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", log)]
    assert spilled, log
    assert max(spilled) <= SPILLED_BYTES.get((VERSION, name, capability), 0), log


def test_quantised_numbers_are_divided_and_rounded_exactly():
    """No approximate division, and subnormal numbers are not flushed to zero: the reference in numpy does neither."""
    ptx = compiled("quantised rows")[0]["ptx"]
    assert "div.rn.f32" in ptx
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert "div.full" not in ptx


@pytest.mark.parametrize("width", [1536, 2048, 2560, 4096, 5120])
def test_an_inner_product_has_one_sum_across_threads(width):
    """Also if a row has a tail."""
    assert compiled(f"tap and norm, {width} in registers")[0]["ptx"].count("bar.sync") <= BARRIERS


@pytest.mark.parametrize("name", ["tap", "tap without residual"])
def test_threads_wait_for_each_other_where_a_row_is_loaded_for_its_block(name):
    """Before and after it is steered. If rows are not aligned, one thread may load an element that another stores."""
    assert compiled(f"{name}, 2560 in registers")[0]["ttir"].count(".barrier") == 2


@pytest.mark.parametrize("name", ["strongest features", "strongest features, with thresholds"])
def test_threads_wait_for_each_other_where_they_share_keys_and_candidates(name):
    """After the keys and after the candidates are written, and before and after candidates get places of others."""
    assert compiled(name)[0]["ttir"].count(".barrier") == 4


@pytest.mark.parametrize("file", sorted(Path(score_copies.__file__).parent.rglob("*.py")), ids=lambda file: file.name)
def test_a_constant_has_no_plain_text_as_its_default(file):
    """Triton 3.6, which vLLM 0.24 requires, compiles no kernel that calls such a function; newer versions do."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(item) for item in node.decorator_list):
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            assert not any(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in defaults), (
                node.name
            )
