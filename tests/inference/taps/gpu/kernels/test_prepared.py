"""A prepared launch passes to CUDA's driver what Triton's launcher would pass for the same rows.

The kernels are compiled, but no GPU is needed: a stand-in for the driver's function reads the arguments from memory, as
the kernel's machine code declares them.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from inference_svc.taps.gpu import score_copies
from inference_svc.taps.gpu.kernels import prepared, resident
from tests.inference.taps.gpu.kernels.test_launching import TABLES, TYPES, bare, fresh, rows_of

__all__ = ["bare", "fresh"]
pytestmark = [pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"), pytest.mark.usefixtures("fresh")]

READ = {
    "u64": ctypes.c_uint64, "b64": ctypes.c_uint64, "u32": ctypes.c_int32, "b32": ctypes.c_int32, "f32": ctypes.c_float
}  # fmt: skip


@dataclass
class Launched:
    """A launch as the driver sees it."""

    function: object
    grid: tuple
    threads: tuple
    shared: int
    stream: int
    arguments: list


class CudaDriver:
    """Stands in for `cuLaunchKernel`: it reads the arguments that the PTX of the kernels declares."""

    def __init__(self):
        self.launches = []
        self.code = 0
        self.declared = {}  # by the kernel's name

    def __call__(self, function, x, y, z, a, b, c, shared, stream, arguments, extra):
        assert extra is None
        pairs = zip(self.declared[function], arguments, strict=True)
        values = [READ[kind].from_address(at).value for kind, at in pairs]
        self.launches.append(Launched(function, (x, y, z), (a, b, c), shared, stream, values))
        return self.code


@pytest.fixture
def cuda(bare, monkeypatch):
    found = CudaDriver()
    monkeypatch.setattr(prepared, "_driver_launch", lambda: found)
    declared = prepared._declared

    def noted(ptx):
        name = re.search(r"\.entry\s+(\w+)", ptx).group(1)
        found.declared[name] = declared(ptx)
        return found.declared[name]

    monkeypatch.setattr(prepared, "_declared", noted)
    yield found
    for launcher in (resident._launch_tap, resident._launch_tap_norm, score_copies._launch_copy):
        for kept in launcher._kept.values():
            kept.module = None  # otherwise it is unloaded when the fake driver is gone


def tables(dtype=torch.bfloat16, *, pool=True):
    """Tables for which no launch was prepared yet."""
    made = TABLES[dtype, pool, True, 0]
    return resident.KernelTables(made.rows, made.programs, made.bank, made.pool, made.scratch, made.scores)


def tap_rows(which, hidden, residual, table, *, point=5, weight=None, epsilon=1e-6, plus_one=False):
    """Tap rows with one of the kernels, and return the addresses of its results by name."""
    if which == "norm":
        weight = torch.zeros(hidden.shape[1], dtype=hidden.dtype) if weight is None else weight
        normed, summed = resident.tap_norm(hidden, residual, weight, epsilon, point, table, plus_one=plus_one)
        return {"normed": normed.data_ptr(), "summed": summed.data_ptr()}
    resident.tap(hidden, None if which == "lone" else residual, point, table)
    return {}


def passed(arguments, kernel):
    """The arguments by name, of those that are in the machine code."""
    names = [name for name in kernel.src.fn.arg_names if kernel.src.signature[name] != "constexpr"]
    return dict(zip(names, arguments, strict=False))


@pytest.mark.parametrize("which", ["tap", "lone", "norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "stride"), [(64, 64), (64, 80), (2048, 2048)])
def test_the_driver_gets_the_arguments_that_triton_would_pass(which, dtype, width, stride, bare, cuda):
    table, weight = tables(dtype), torch.zeros(width, dtype=dtype)

    def rows():
        return [torch.zeros(8 * step, dtype=dtype).as_strided((8, width), (step, 1)) for step in (stride, width)]

    tap_rows(which, *rows(), table, weight=weight)
    assert len(bare.launches) == 1, "the first is made by Triton"
    bare.stream = 101
    changed = rows()
    results = tap_rows(which, *changed, table, weight=weight)
    (launched,) = cuda.launches
    assert len(bare.launches) == 1, "the second is not"
    table.prepared.clear()
    own_results = tap_rows(which, *changed, table, weight=weight)
    own = bare.launches[-1]
    (kernel,) = (resident._launch_tap_norm if which == "norm" else resident._launch_tap)._kept.values()
    by_name = {
        name: value[1]
        for name, value in zip(kernel.src.fn.arg_names, own.arguments, strict=True)
        if kernel.src.signature[name] != "constexpr"
    }
    assert {name: by_name[name] for name in own_results} == own_results
    expected, got = {**by_name, **results}, passed(launched.arguments, kernel)
    for name, value in expected.items():
        assert got[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name
    assert not any(launched.arguments[len(got) :]), "Triton's own memory is not needed"
    assert launched.grid == own.grid == (8, 1, 1)
    assert launched.threads == (32 * kernel.metadata.num_warps, 1, 1)
    assert launched.shared == kernel.metadata.shared
    assert launched.stream == own.stream == 101
    assert launched.function is own.kernel is kernel.function
    if width == 2048 and which == "norm":
        assert launched.shared > 0, "its warps add up what each has"


FIRST = {"which": "norm", "point": 5, "width": 64, "stride": 64, "other_stride": 64, "dtype": torch.bfloat16}
OTHERS = [
    {"which": "tap"},
    {"which": "lone"},
    {"point": 6},
    {"width": 32},
    {"stride": 80},
    {"other_stride": 80},
    {"dtype": torch.float16},
    {"other_dtype": torch.float32},
    {"weight_dtype": torch.float32},
    {"dtype": torch.float32, "other_dtype": torch.bfloat16, "weight_dtype": torch.bfloat16},
    {"epsilon": 1e-5},
    {"plus_one": True},
    *({"which": "tap", **more} for more in (
        {"point": 6}, {"width": 32}, {"stride": 80}, {"other_stride": 80}, {"dtype": torch.float16},
        {"other_dtype": torch.float32},
    )),
]  # fmt: skip


def test_launches_that_differ_in_more_than_addresses_are_prepared_apart(bare, cuda):
    table = tables()

    def tap(which, point, width, stride, other_stride, dtype, other_dtype=None, weight_dtype=None, **more):
        hidden, other = (
            torch.zeros(8 * step, dtype=kind).as_strided((8, width), (step, 1))
            for step, kind in ((stride, dtype), (other_stride, other_dtype or dtype))
        )
        weight = torch.zeros(width, dtype=weight_dtype or dtype)
        tap_rows(which, hidden, other, table, point=point, weight=weight, **more)

    for case in ({}, *OTHERS):
        tap(**{**FIRST, **case})
    assert len(table.prepared) == len(bare.launches) == 1 + len(OTHERS)
    assert all(table.prepared.values())
    assert not cuda.launches
    for case in ({}, *OTHERS):
        tap(**{**FIRST, **case})
    assert len(table.prepared) == len(cuda.launches) == 1 + len(OTHERS)


def test_copies_of_tables_have_launches_of_their_own(bare, cuda):
    first = tables()
    scores = torch.ones(64, 16)
    second = replace(first, scores=scores)
    rows = [rows_of(TYPES[0], 64, 0) for _ in range(2)]
    for table in (first, first, second, second):
        resident.tap(*rows, 5, table)
    assert len(bare.launches) == len(cuda.launches) == 2
    (kernel,) = resident._launch_tap._kept.values()
    found = [passed(launch.arguments, kernel)["scores"] for launch in cuda.launches]
    assert found == [first.scores.data_ptr(), scores.data_ptr()]


def test_rows_at_other_addresses_are_left_to_triton(bare, cuda):
    table = tables()
    resident.tap(rows_of(TYPES[0], 80, 0), None, 5, table)
    for offset in (1, 2, 4):
        resident.tap(rows_of(TYPES[0], 80, offset), None, 5, table)
    assert len(bare.launches) == 4
    assert not cuda.launches
    resident.tap(rows_of(TYPES[0], 80, 8), None, 5, table)
    assert len(cuda.launches) == 1


def test_a_launch_is_prepared_once_rows_are_aligned(bare, cuda):
    table = tables()
    resident.tap(rows_of(TYPES[0], 80, 1), None, 5, table)
    assert not table.prepared
    for _ in range(2):
        resident.tap(rows_of(TYPES[0], 80, 0), None, 5, table)
    assert len(bare.launches) == 2
    assert len(cuda.launches) == 1


def test_the_driver_s_function_is_declared(monkeypatch):
    class Library:
        class cuLaunchKernel:  # noqa: N801 - the driver's name
            pass

    monkeypatch.setattr(prepared, "patient_library", lambda: Library)
    prepared._driver_launch.cache_clear()
    try:
        launch = prepared._driver_launch()
    finally:
        prepared._driver_launch.cache_clear()
    sizes = [ctypes.sizeof(kind) for kind in launch.argtypes]
    assert sizes == [8, *[4] * 7, 8, 8, 8], "function, grid, block and shared memory, stream, arguments, extra"


def test_without_a_pool_triton_makes_each_launch(bare, cuda):
    table = tables(pool=False)
    for _ in range(2):
        resident.tap(rows_of(TYPES[0], 64, 0), None, 5, table)
    assert len(bare.launches) == 2
    assert not cuda.launches


def test_copies_of_scores_differ_in_their_table_and_their_number(bare, cuda):
    buffer, board, tables = torch.zeros(8, 64), torch.zeros(64), torch.zeros(2, 8, 6, dtype=torch.int64)
    launch = score_copies.ScoreLaunch(buffer, board)
    launch(tables[0], 3)
    bare.stream = 101
    launch(tables[1], 7)
    (first,), (second,) = bare.launches, cuda.launches
    (kernel,) = score_copies._launch_copy._kept.values()
    assert second.function is first.kernel is kernel.function
    assert second.grid == first.grid
    assert second.stream == 101
    assert passed(second.arguments, kernel) == {
        "table": tables[1].data_ptr(), "count": 7, "buffer": buffer.data_ptr(), "board": board.data_ptr()
    }  # fmt: skip


def test_no_rows_are_no_launch(bare, cuda):
    table = tables()
    empty = torch.zeros(0, 64, dtype=TYPES[0])
    resident.tap(empty, None, 5, table)
    normed, summed = resident.tap_norm(empty, empty, torch.zeros(64), 1e-6, 5, table, plus_one=False)
    assert normed.shape == summed.shape == (0, 64)
    assert not bare.launches
    assert not cuda.launches


def test_an_error_of_the_driver_is_raised(cuda):
    table = tables()
    resident.tap(rows_of(TYPES[0], 64, 0), None, 5, table)
    cuda.code = 700
    with pytest.raises(prepared.LaunchError, match="error 700"):
        resident.tap(rows_of(TYPES[0], 64, 0), None, 5, table)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "change",
    [
        lambda ptx: ptx.replace(".param .f32", ".param .f64"),
        lambda ptx: ptx.replace(".param .u32", ".param .u64", 1),
        lambda ptx: ptx.replace(".param .u64", ".param .u32", 1),
        lambda ptx: ptx.replace(")", ",\n.param .u32 one_more)", 1),
        lambda ptx: ptx.replace(")", ",\n.param .u64 one_more)", 1),
        lambda ptx: ".param .u32".join(ptx[: ptx.index(")")].rsplit(".param .u64", 1)) + ptx[ptx.index(")") :],
        lambda ptx: re.sub(r"(,\s*\.param[^,)]*){3}\s*\)", ")", ptx, count=1),
        lambda ptx: ptx.replace(".entry", ".other"),
        lambda ptx: "",
    ],
    ids=["float", "number", "pointer", "one more", "one more pointer", "another last", "fewer", "no entry", "no PTX"],
)
def test_a_kernel_that_declares_other_parameters_is_left_to_triton(change, bare, monkeypatch):
    declared = prepared._declared
    monkeypatch.setattr(prepared, "_declared", lambda ptx: declared(change(ptx)))
    assert_left_to_triton(bare)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_ctas", 2),
        ("global_scratch_size", 16),
        ("profile_scratch_size", 16),
        ("launch_cooperative_grid", True),
        ("launch_pdl", True),
        ("shared", 64 << 10),
        ("instrumentation_mode", "gsan"),
    ],
)
def test_a_kernel_that_needs_more_is_left_to_triton(name, value, bare, monkeypatch):
    is_plain = prepared._is_plain
    monkeypatch.setattr(
        prepared, "_is_plain", lambda metadata: is_plain(SimpleNamespace(**{**metadata._asdict(), name: value}))
    )
    assert_left_to_triton(bare)


def test_a_profiler_hears_of_each_launch(bare, cuda, monkeypatch):
    triton = pytest.importorskip("triton")
    table = tables()
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        for _ in range(2):
            resident.tap(rows_of(TYPES[0], 64, 0), None, 5, table)
    assert len(bare.launches) == 2
    for _ in range(2):  # when it has gone
        resident.tap(rows_of(TYPES[0], 64, 0), None, 5, table)
    assert len(bare.launches) == 3
    assert len(cuda.launches) == 1


def test_an_untested_triton_makes_each_launch_and_is_not_asked_for_hooks(cuda, monkeypatch):
    made = []
    launcher = resident._launch_tap
    monkeypatch.setattr(launcher, "_keeping", None)
    monkeypatch.setattr(type(launcher._function), "__getitem__", lambda *_: lambda *rest, **more: made.append(rest))
    monkeypatch.delattr("triton.knobs")
    table = tables()
    for _ in range(2):
        resident.tap(rows_of(TYPES[0], 64, 0), None, 5, table)
    assert len(made) == 2
    assert not table.prepared
    assert not cuda.launches


def test_without_a_driver_triton_makes_each_launch(bare, monkeypatch):
    monkeypatch.setattr(prepared, "_driver_launch", lambda: None)
    assert_left_to_triton(bare)
    for kept in resident._launch_tap._kept.values():
        kept.module = None


def assert_left_to_triton(bare):
    table = tables()
    for _ in range(2):
        resident.tap(rows_of(TYPES[0], 64, 0), None, 5, table)
    assert len(bare.launches) == 2
    assert list(table.prepared.values()) == [None]
