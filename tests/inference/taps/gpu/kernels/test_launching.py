"""A launch by a kept kernel is the launch that Triton makes itself: the same kernel, grid, stream and arguments.

This needs no GPU: the driver is a fake one, and machine code is neither made nor run, except in one test that makes it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402

from inference_svc.taps.gpu import score_copies  # noqa: E402
from inference_svc.taps.gpu.kernels import (  # noqa: E402
    chunked,
    encodings,
    features,
    launching,
    resident,
    resident_norm,
    resident_tap,
)
from inference_svc.taps.gpu.kernels.launching import Launcher  # noqa: E402
from inference_svc.taps.gpu.score_copies import HostPointer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

TYPES = torch.bfloat16, torch.float16, torch.float32
BEYOND_INT32 = 2**31
NUMBERS = 0, 1, 16, 17, 2560, BEYOND_INT32 - 1, BEYOND_INT32, BEYOND_INT32 + 1, 2**63


class Launch(NamedTuple):
    grid: tuple
    stream: int
    kernel: object
    arguments: tuple


class Driver:
    """A driver of one or more GPUs that only writes down what is launched."""

    def __init__(self):
        self.launches = []
        self.device, self.stream = 0, 100
        self.utils = self
        self.launcher_cls = lambda source, metadata: self.launch

    def launch(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        self.launches.append(Launch((x, y, z), stream, function, tuple(map(plain, arguments))))

    def load_binary(self, name, *rest):
        return object(), name, 96, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 200_000}

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        assert device == self.device
        return self.stream

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class Uncompiled(CompiledKernel):
    """A kernel without machine code. Triton makes one for each specialisation."""

    def __init__(self, source, gpu):
        self.src, self.name, self.metadata, self.packed_metadata = source, source.name, None, ()
        self.module = self.function = self
        self._run = gpu.launch

    def __del__(self):
        pass


def plain(argument):
    """Tensors as their addresses, so that launches can be compared."""
    return ("at", argument.data_ptr(), argument.dtype) if hasattr(argument, "data_ptr") else (type(argument), argument)


FUNCTIONS = (
    resident_tap.tap_kernel,
    resident_norm.tap_norm_kernel,
    chunked._tap_kernel,
    chunked._tap_copy_kernel,
    chunked._tap_experts_kernel,
    encodings._quantize_rows_kernel,
    encodings._quantize_columns_kernel,
    encodings._keep_largest_kernel,
    encodings._inner_products_kernel,
    features._keep_strongest_kernel,
    score_copies._copy_kernel,
)


@pytest.fixture
def bare(monkeypatch):
    """The fake driver, with functions that have compiled nothing yet."""
    fake = Driver()
    monkeypatch.setattr(driver, "_active", fake)
    for function in FUNCTIONS:
        monkeypatch.setattr(function, "device_caches", defaultdict(function.create_binder))
    return fake


@pytest.fixture
def gpu(bare, monkeypatch):
    """The same, and kernels are not compiled."""
    monkeypatch.setattr("triton.compiler.compile", lambda source, **options: Uncompiled(source, bare))
    return bare


def shapes(function):
    """Arguments of a function: pointers to any type, numbers, and floats, each where the function has them."""
    pointer = st.builds(
        lambda dtype, line, off: HostPointer(4096 + 16 * line + off, dtype),
        st.sampled_from(TYPES),
        st.integers(0, 3),
        st.sampled_from((0, 2, 4, 8, 14)),
    )
    number = st.sampled_from(NUMBERS) | st.integers(0, 40)
    kinds = {**dict.fromkeys(FLOATS, st.floats(0, 1)), **dict.fromkeys(INTEGERS, number)}
    names = [item.name for item in function.params if not item.is_constexpr]
    return st.tuples(*(kinds.get(name, pointer | st.none() if name in OPTIONAL else pointer) for name in names))


FLOATS = {"max_abs", "epsilon", "scale", "factor"}
OPTIONAL = {"scores", "residual"}
INTEGERS = {
    *("point", "num_points", "hidden_stride", "residual_stride", "width", "rows", "weights_stride", "experts_stride"),
    *("chosen", "positions", "capacity", "unit_bytes", "count", "stride", "vector_step", "element_step"),
    *("features", "wanted", "room"),
}


def constants_of(function):
    names = [item.name for item in function.params if item.is_constexpr]
    values = st.sampled_from((True, False, 1, 0, 16, 2048, 1.0, 0.0))
    return st.tuples(*(values for _ in names)).map(lambda chosen: dict(zip(names, chosen, strict=True)))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda item: f"{item.__module__.split('.')[-1]}.{item.__name__}")
def test_every_launch_is_the_one_that_triton_makes(function, gpu):
    launcher = Launcher(function)  # one for all examples: a kernel that it kept for others must not be found

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(shapes(function), constants_of(function), st.integers(0, 1), st.integers(100, 102))
    def check(arguments, constants, device, stream):
        gpu.device, gpu.stream = device, stream
        grid = 3, 2, 1
        for num_warps, maxnreg in itertools.product((4, 8), (None, 96)):
            gpu.launches.clear()
            for _ in range(2):  # the second time with the kernel that was kept
                launcher(grid, arguments, constants, num_warps=num_warps, maxnreg=maxnreg)
            function[grid](*arguments, **constants, num_warps=num_warps, maxnreg=maxnreg)
            first, second, own = gpu.launches
            assert first == second == own
            assert second.kernel is own.kernel
            assert second.stream == stream

    check()
    assert launcher._kept


def tables(dtype, *, pool=True, scores=True, offset=0):
    """Tables as those of a service; `offset` elements shift the pool and the scores."""
    zeros = torch.zeros

    class Programs:
        lines, entries = zeros(4, 72, 8, dtype=torch.int32), zeros(16, 4, dtype=torch.int32)

    class Bank:
        vectors, inverse_norms = zeros(8, 64), zeros(8)

    class Pool:
        memory = zeros(65 * 64, dtype=dtype)[offset:][: 64 * 64].view(64, 64)

    rows = zeros(64, 4, dtype=torch.int32)
    scores = zeros(65 * 16)[offset:][: 64 * 16].view(64, 16) if scores else None
    return resident.KernelTables(rows, Programs, Bank, Pool if pool else None, zeros(8, 64), scores)


def rows_of(dtype, stride, offset):
    """8 rows of 64 elements, `stride` elements apart, from `offset` on."""
    return torch.zeros(8 * stride + 64, dtype=dtype).as_strided((8, 64), (stride, 1), offset)


LAYOUTS = st.tuples(st.sampled_from((64, 65, 80, 128)), st.sampled_from((0, 1, 2, 8)))
TABLES = {
    key: tables(key[0], pool=key[1], scores=key[2], offset=key[3])
    for key in itertools.product(TYPES, (True, False), (True, False), (0, 1))
}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    hidden=LAYOUTS,
    residual=LAYOUTS | st.none(),
    dtype=st.sampled_from(TYPES),
    chosen=st.sampled_from(sorted(TABLES, key=str)),
    point=st.sampled_from((0, 1, 16, 17, 32, 35)),
    which=st.sampled_from(("tap", "tap_norm", "chunked", "copy")),
)
def check_taps(gpu, hidden, residual, dtype, chosen, point, which):
    hidden = rows_of(dtype, *hidden)
    residual = None if residual is None else rows_of(dtype, *residual)
    table = TABLES[chosen]
    weight = torch.zeros(64, dtype=dtype)
    other = hidden if residual is None else residual
    call = {
        "tap": lambda: resident.tap(hidden, residual, point, table),
        "tap_norm": lambda: resident.tap_norm(hidden, other, weight, 1e-6, point, table, plus_one=False),
        "chunked": lambda: chunked.tap(hidden, residual, point, table),
        "copy": lambda: chunked.tap_copy(hidden, point, table),
    }[which]
    gpu.launches.clear()
    call()
    call()
    functions = {
        "tap": (resident, "_launch_tap"),
        "tap_norm": (resident, "_launch_tap_norm"),
        "chunked": (chunked, "_launch_tap"),
        "copy": (chunked, "_launch_tap_copy"),
    }
    module, name = functions[which]
    launcher = getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, ordinary(launcher._function))
        call()
    first, second, own = map(without_results, gpu.launches)
    assert first == second == own
    assert first.grid == (8, 1, 1)
    assert second.kernel is own.kernel


def ordinary(function):
    """A launcher that never keeps a kernel."""
    launcher = Launcher(function)
    launcher._keeping = None
    return launcher


def without_results(launch):
    """A launch without the addresses of new tensors for results, which differ from launch to launch."""
    names = [item.name for item in launch.kernel.src.fn.params]
    new = {"normed", "summed", "copy"}
    return launch._replace(
        arguments=tuple(
            (value[0], value[1] % 16, value[2]) if name in new else value
            for name, value in zip(names, launch.arguments, strict=True)
        )
    )


@pytest.fixture
def fresh(monkeypatch):
    """New launchers for the taps: those of the modules may have kept kernels."""
    for module, name in (
        (resident, "_launch_tap"),
        (resident, "_launch_tap_norm"),
        (chunked, "_launch_tap"),
        (chunked, "_launch_tap_copy"),
        (score_copies, "_launch_copy"),
    ):
        monkeypatch.setattr(module, name, Launcher(getattr(module, name)._function))


@pytest.mark.usefixtures("fresh")
def test_the_taps_pass_what_triton_would_pass(gpu):
    check_taps(gpu)
    assert resident._launch_tap._kept
    assert chunked._launch_tap._kept


@pytest.mark.usefixtures("fresh")
def test_a_compiled_kernel_is_kept_and_launched_on_the_current_stream(bare):
    hidden, residual, table = rows_of(torch.bfloat16, 64, 0), rows_of(torch.bfloat16, 64, 0), TABLES[TYPES[0], 1, 1, 0]
    for stream in (100, 200):  # as inside and outside the capture of a CUDA graph
        bare.stream = stream
        resident.tap(hidden, residual, 5, table)
    first, second = bare.launches
    assert first.stream == 100
    assert second == first._replace(stream=200)
    (kept,) = resident._launch_tap._kept.values()
    assert type(kept) is CompiledKernel
    kept.module = None  # otherwise it is unloaded when the fake driver is gone


def test_a_kept_kernel_is_launched_without_triton_s_launcher(gpu, monkeypatch):
    launcher = Launcher(score_copies._copy_kernel)
    table, *pointers = HostPointer(32, torch.int64), HostPointer(0, torch.float32), HostPointer(16, torch.float32)
    launcher((1, 1, 1), (table, 5, *pointers), {"ROWS": 32}, num_warps=4)
    monkeypatch.setattr(type(launcher._function), "run", None)
    launcher((1, 1, 1), (table, 6, *pointers), {"ROWS": 32}, num_warps=4)  # it is not specialised on the count
    assert [launch.arguments[1] for launch in gpu.launches] == [(int, 5), (int, 6)]
    with pytest.raises(TypeError):
        launcher((1, 1, 1), (table, BEYOND_INT32, *pointers), {"ROWS": 32}, num_warps=4)  # another kernel: int64


@pytest.mark.parametrize("has_threshold", [False, True])
def test_features_take_the_kernel_of_the_startup_check_whatever_the_addresses(has_threshold, gpu, monkeypatch):
    """Encoders, outputs and candidates begin anywhere. To compile for their alignment would hold up requests."""
    monkeypatch.setattr(features, "_launch_keep_strongest", Launcher(features._keep_strongest_kernel))
    for offsets in ((0,) * 5, *itertools.product((0, 1, 2), repeat=5)):
        outputs, biases, threshold = (torch.zeros(120)[offset:] for offset in offsets[:3])
        candidates, out = (torch.zeros(400, dtype=torch.int32)[offset:] for offset in offsets[3:])
        features.keep_strongest(
            outputs[:99].view(3, 33), biases[:33], threshold[:33] if has_threshold else None, candidates,
            out[:48].view(3, 2, 8), 5,
        )  # fmt: skip
    assert len({launch.arguments for launch in gpu.launches}) > 100
    assert len({id(launch.kernel) for launch in gpu.launches}) == 1


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_an_untested_version_of_triton_launches_each_kernel_itself(version, gpu, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    assert_launches_itself(gpu)


@pytest.mark.parametrize(
    "lost",
    ["triton.JITFunction", "triton.compiler.CompiledKernel.__getitem__"],
)
def test_triton_launches_each_kernel_itself_if_it_lacks_what_is_needed(lost, gpu, monkeypatch):
    monkeypatch.delattr(lost)
    assert_launches_itself(gpu)


def assert_launches_itself(gpu):
    launcher = Launcher(score_copies._copy_kernel)
    arguments = HostPointer(32, torch.int64), 5, HostPointer(0, torch.float32), HostPointer(16, torch.float32)
    for _ in range(2):
        launcher((3, 2, 1), arguments, {"ROWS": 32}, num_warps=4)
    assert not launcher._kept
    first, second = gpu.launches
    assert first == second
    assert first.grid == (3, 2, 1)


def test_an_argument_of_another_kind_is_left_to_triton(gpu):
    launcher = Launcher(score_copies._copy_kernel)
    pointer = HostPointer(0, torch.float32)
    launcher((1, 1, 1), (pointer, True, pointer, pointer), {"ROWS": 32}, num_warps=4)
    assert not launcher._kept
    assert len(gpu.launches) == 1


def test_constants_must_be_all_that_is_left_of_the_parameters(gpu):
    launcher = Launcher(score_copies._copy_kernel)
    with pytest.raises(ValueError, match="after 1 arguments: ROWS"):
        launcher((1, 1, 1), (HostPointer(0, torch.float32),), {"ROWS": 32}, num_warps=4)
    assert not gpu.launches


def test_the_installed_triton_is_a_tested_one():
    """Otherwise the taps are slower: run `make test-triton` with this version, and add it to `launching`."""
    assert launching._keeping(resident_tap.tap_kernel)
