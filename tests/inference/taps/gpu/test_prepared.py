"""A prepared launch passes to CUDA's driver what Triton's launcher would pass for the same rows.

The kernels are compiled, but no GPU is needed: a stand-in for the driver's function reads the arguments from memory, as
the kernel's machine code declares them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from inference_svc.taps.gpu.kernels import prepared, resident
from tests.inference.taps.gpu.test_launching import TABLES, TYPES, bare, fresh, rows_of

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
        self.declared = []

    def __call__(self, function, x, y, z, a, b, c, shared, stream, arguments, extra):
        assert extra is None
        assert len(arguments) == len(self.declared)
        values = [READ[kind].from_address(at).value for kind, at in zip(self.declared, arguments, strict=True)]
        self.launches.append(Launched(function, (x, y, z), (a, b, c), shared, stream, values))
        return self.code


@pytest.fixture
def cuda(bare, monkeypatch):
    found = CudaDriver()
    monkeypatch.setattr(prepared, "_driver_launch", lambda: found)
    declared = prepared._declared

    def noted(ptx):
        found.declared = declared(ptx)
        return found.declared

    monkeypatch.setattr(prepared, "_declared", noted)
    yield found
    for launcher in (resident._launch_tap, resident._launch_tap_norm):
        for kept in launcher._kept.values():
            kept.module = None  # otherwise it is unloaded when the fake driver is gone


def tables(dtype=torch.bfloat16, *, pool=True):
    """Tables for which no launch was prepared yet."""
    made = TABLES[dtype, pool, True, 0]
    return resident.KernelTables(made.rows, made.programs, made.bank, made.pool, made.scratch, made.scores)


@pytest.mark.parametrize("which", ["tap", "lone", "norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stride", [64, 80])
def test_the_driver_gets_the_arguments_that_triton_would_pass(which, dtype, stride, bare, cuda):
    table = tables(dtype)
    weight = torch.zeros(64, dtype=dtype)

    launcher = resident._launch_tap_norm if which == "norm" else resident._launch_tap

    def tap(hidden, residual):
        if which == "norm":
            resident.tap_norm(hidden, residual, weight, 1e-6, 5, table, plus_one=False)
        else:
            resident.tap(hidden, None if which == "lone" else residual, 5, table)

    tap(rows_of(dtype, stride, 0), rows_of(dtype, 64, 0))
    assert len(bare.launches) == 1, "the first is made by Triton"
    rows = rows_of(dtype, stride, 0), rows_of(dtype, 64, 0)
    bare.stream = 101
    tap(*rows)
    (launched,) = cuda.launches
    assert len(bare.launches) == 1, "the second is not"
    table.prepared.clear()
    tap(*rows)
    assert len(bare.launches) == 2
    own = bare.launches[-1]
    (kernel,) = launcher._kept.values()
    names = kernel.src.fn.arg_names
    expected = {
        name: value[1]
        for name, value in zip(names, own.arguments, strict=True)
        if kernel.src.signature[name] != "constexpr"
    }
    got = dict(zip(expected, launched.arguments, strict=False))
    results = ("normed", "summed") if which == "norm" else ()
    for name in results:  # new tensors each time
        assert got[name] % 16 == expected[name] % 16 == 0
        assert got[name]
        del got[name], expected[name]
    assert got == pytest.approx(expected, rel=1e-6)
    assert not any(launched.arguments[len(expected) + len(results) :]), "Triton's own memory is not needed"
    assert launched.grid == own.grid == (8, 1, 1)
    assert launched.threads == (32 * kernel.metadata.num_warps, 1, 1)
    assert launched.shared == kernel.metadata.shared
    assert launched.stream == own.stream == 101
    assert launched.function is own.kernel is kernel.function


def test_each_point_layout_and_type_has_its_own_launch(bare, cuda):
    table = tables()
    cases = [(point, stride, residual) for point in (5, 6) for stride in (64, 80) for residual in (True, False)]

    def tap(point, stride, has_residual):
        resident.tap(rows_of(TYPES[0], stride, 0), rows_of(TYPES[0], stride, 0) if has_residual else None, point, table)

    for case in cases:
        tap(*case)
    assert len(table.prepared) == len(bare.launches) == len(cases)
    for case in cases:
        tap(*case)
    assert len(cuda.launches) == len(cases)


def test_rows_at_other_addresses_are_left_to_triton(bare, cuda):
    table = tables()
    resident.tap(rows_of(TYPES[0], 80, 0), None, 5, table)
    for offset in (1, 2, 4):
        resident.tap(rows_of(TYPES[0], 80, offset), None, 5, table)
    assert len(bare.launches) == 4
    assert not cuda.launches
    resident.tap(rows_of(TYPES[0], 80, 8), None, 5, table)
    assert len(cuda.launches) == 1


def test_without_a_pool_triton_makes_each_launch(bare, cuda):
    table = tables(pool=False)
    for _ in range(2):
        resident.tap(rows_of(TYPES[0], 64, 0), None, 5, table)
    assert len(bare.launches) == 2
    assert not cuda.launches


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
        lambda ptx: ptx.replace(".entry", ".other"),
        lambda ptx: "",
    ],
    ids=["float", "number", "pointer", "one more", "no entry", "no PTX"],
)
def test_a_kernel_that_declares_other_parameters_is_left_to_triton(change, bare, monkeypatch):
    declared = prepared._declared
    monkeypatch.setattr(prepared, "_declared", lambda ptx: declared(change(ptx)))
    assert_left_to_triton(bare)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "name", ["num_ctas", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"]
)
def test_a_kernel_that_needs_more_is_left_to_triton(name, bare, monkeypatch):
    plain_metadata = prepared._is_plain
    monkeypatch.setattr(prepared, "_is_plain", lambda metadata: plain_metadata(metadata._replace(**{name: 2})))
    assert_left_to_triton(bare)


@pytest.mark.usefixtures("cuda")
def test_a_profiler_hears_of_each_launch(bare, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert_left_to_triton(bare)


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
