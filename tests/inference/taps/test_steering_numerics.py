"""The arithmetic of steering as a whole: rows of any dtype with several operations each, against float64.

`test_operations.py` tests single operations, and `gpu/kernels/test_kernel.py` the GPU's kernels, with the same cases.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.taps.cpu.tap import CpuTap
from tests.inference.taps.steering_cases import (
    POINT,
    POINTS,
    Case,
    awkward_rows,
    check_captured,
    check_gathered_norm,
    check_large_residual,
    check_long_vectors,
    check_overflow,
    check_set,
    idle_operations,
    make_case,
    make_tables,
    neighbours,
    same_bits,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 1 << 32)


def steered(case):
    tap = CpuTap(case.bank(), None, POINTS)
    tap.arm(case.layout())
    hidden = case.hidden.clone()
    tap.tap(hidden, case.residual, POINT)
    return hidden


@settings(deadline=None, max_examples=300)
@given(SEEDS, DTYPES, st.integers(1, 64), st.integers(2, 70), st.integers(1, 8), st.booleans())
def test_steering_by_any_operations_agrees_with_float64(seed, dtype, rows, hidden, most, has_residual):
    case = make_case(seed, dtype, rows, hidden, most, has_residual=has_residual)
    case.check(steered(case))


@settings(deadline=None, max_examples=100)
@given(SEEDS, SEEDS, DTYPES, st.integers(1, 64), st.sampled_from([2, 17, 64, 1000]), st.booleans())
def test_a_steered_row_depends_only_on_its_own_request(seed, other_seed, dtype, rows, hidden, has_residual):
    case = make_case(seed, dtype, rows, hidden, 8, has_residual=has_residual)
    mine = seed % rows
    assert same_bits(steered(case)[mine], steered(neighbours(case, mine, other_seed))[mine])


@pytest.mark.parametrize("hidden", [576, 4096])
def test_a_steered_row_does_not_depend_on_the_steering_of_other_rows(hidden):
    """The number of steered rows changes the shape of torch's tensors, even if the batch has the same size."""
    case = make_case(1, torch.bfloat16, 64, hidden, 8, has_residual=True)
    case.operations[5] = (
        make_case(2, torch.bfloat16, 1, hidden, 8, has_residual=True).operations[0] or case.operations[5]
    )
    alone = Case(case.hidden, case.residual, [[]] * 5 + [case.operations[5]] + [[]] * 58, case.vectors)
    assert case.operations[5]
    assert same_bits(steered(case)[5], steered(alone)[5])


@settings(deadline=None, max_examples=100)
@given(SEEDS, DTYPES, st.integers(1, 64), st.integers(1, 40), st.integers(1, 6), st.booleans())
def test_steering_that_moves_nothing_keeps_every_bit_of_rows(seed, dtype, rows, hidden, count, has_residual):
    case = make_case(seed, dtype, rows, hidden, 1, has_residual=has_residual)
    case.hidden = awkward_rows(dtype, rows, hidden, seed)
    case.operations = [idle_operations()[row % 6 :][:count] if row % 3 else [] for row in range(rows)]
    assert same_bits(steered(case), case.hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_residual", [False, True])
def test_no_steering_makes_an_infinity_or_nan(dtype, has_residual):
    check_overflow(make_case(3, dtype, 24, 70, 1, has_residual=has_residual), steered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_a_large_residual_or_norm_stay_finite(dtype):
    check_large_residual(dtype, 70, steered)
    check_gathered_norm(dtype, 70, steered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_keep_their_norm_beside_the_longest_vectors(dtype):
    check_long_vectors(dtype, 70, steered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_without_a_residual_is_set_exactly(dtype):
    check_set(dtype, 70, steered)


# ------------------------------------------------------------------------------------------------ the kernel on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run the compiled kernel")
CUDA = torch.device("cuda")


def steered_on_gpu(case):
    from inference_svc.taps.gpu.kernels import chunked, resident
    from inference_svc.taps.gpu.tables import MAX_RESIDENT

    hidden = case.hidden.to(CUDA)
    residual = None if case.residual is None else case.residual.to(CUDA)
    tap = chunked.tap if hidden.shape[1] > MAX_RESIDENT else resident.tap
    tap(hidden, residual, POINT, make_tables(case.layout(), len(hidden), case.bank(CUDA)))
    return hidden.cpu()


@needs_gpu
@settings(deadline=None, max_examples=200)
@given(
    SEEDS,
    SEEDS,
    DTYPES,
    st.integers(1, 64),
    st.sampled_from([2, 70, 576, 1024, 1536, 2560, 4096, 11008]),
    st.booleans(),
)
def test_steering_on_a_gpu_agrees_with_float64_and_depends_on_no_other_row(
    seed, other_seed, dtype, rows, hidden, has_residual
):
    case = make_case(seed, dtype, rows, hidden, 8, has_residual=has_residual)
    got = steered_on_gpu(case)
    case.check(got)
    mine = seed % rows
    assert same_bits(got[mine], steered_on_gpu(neighbours(case, mine, other_seed))[mine])


@needs_gpu
@settings(deadline=None, max_examples=100)
@given(SEEDS, DTYPES, st.sampled_from([2, 70, 576, 1024, 2560, 4096]), st.booleans())
def test_steering_on_a_gpu_that_moves_nothing_keeps_every_bit_of_rows(seed, dtype, hidden, has_residual):
    case = make_case(seed, dtype, 24, hidden, 1, has_residual=has_residual)
    case.hidden = awkward_rows(dtype, 24, hidden, seed)
    case.operations = [idle_operations()[row % 6 :] if row % 4 else [] for row in range(24)]
    assert same_bits(steered_on_gpu(case), case.hidden)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("hidden", [70, 2560, 4096])
def test_no_steering_on_a_gpu_makes_an_infinity_or_nan(dtype, has_residual, hidden):
    check_overflow(make_case(3, dtype, 24, hidden, 1, has_residual=has_residual), steered_on_gpu)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [70, 2560, 4096, 11008])
def test_rows_with_a_large_residual_or_norm_stay_finite_on_a_gpu(dtype, hidden):
    check_large_residual(dtype, hidden, steered_on_gpu)
    check_gathered_norm(dtype, hidden, steered_on_gpu)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [70, 2560, 4096, 11008])
def test_rows_keep_their_norm_beside_the_longest_vectors_on_a_gpu(dtype, hidden):
    check_long_vectors(dtype, hidden, steered_on_gpu)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [70, 2560, 4096, 11008])
def test_a_row_without_a_residual_is_set_exactly_on_a_gpu(dtype, hidden):
    check_set(dtype, hidden, steered_on_gpu)


@needs_gpu
@settings(deadline=None, max_examples=100)
@given(SEEDS, DTYPES, st.integers(1, 64), st.sampled_from([2, 70, 576, 1536, 2560, 4096]))
def test_the_sum_that_is_normed_on_a_gpu_agrees_with_float64(seed, dtype, rows, hidden):
    """The sum of the rows and zeros: then the steered sum is what `check` expects of the steered rows."""
    from tests.inference.taps.gpu.kernels import lone_adds

    case = make_case(seed, dtype, rows, hidden, 8, has_residual=False)
    got = case.hidden.to(CUDA)
    lone_adds.norm(got, None, POINT, make_tables(case.layout(), rows, case.bank(CUDA)))
    case.check(got.cpu())


@needs_gpu
@settings(deadline=None, max_examples=100)
@given(SEEDS, DTYPES, st.integers(1, 64), st.sampled_from([2, 70, 577, 1024, 2560, 4095]), st.booleans(), st.booleans())
def test_rows_captured_on_a_gpu_are_those_that_the_model_computes(
    seed, dtype, rows, hidden, has_residual, before_steering
):
    """Also rows that are not aligned: there, one thread may load an element that another stores."""
    from inference_svc.taps.gpu.kernels import chunked, resident

    case = make_case(seed, dtype, rows, hidden, 8, has_residual=has_residual)
    for tap in (resident.tap, chunked.tap):
        check_captured(case, tap, CUDA, before_steering=before_steering)


@needs_gpu
@settings(deadline=None, max_examples=20)
@given(SEEDS, DTYPES, st.sampled_from([2, 70, 577, 2560, 4096]))
def test_operations_that_move_nothing_change_no_bit_of_an_add_on_a_gpu(seed, dtype, hidden):
    from tests.inference.taps.gpu.kernels import lone_adds

    for tap in (lone_adds.resident.tap, lone_adds.norm):
        lone_adds.check_lone_adds(tap, dtype, hidden, seed, CUDA)
