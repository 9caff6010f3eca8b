"""Runs the GPU's encoders on the CPU, in Triton's interpreter, and fails if they differ from the reference.

It is a separate program, because Triton decides on import whether it interprets kernels.
"""

from __future__ import annotations

import tests.triton_interpreter  # noqa: F401

# isort: split

from unittest import mock

import numpy as np
import torch

from inference_svc.taps.encodings import sae_encoder
from inference_svc.taps.gpu import encoder as gpu_encoder
from inference_svc.taps.gpu.encoder import FeatureRows, GpuEncoder
from inference_svc.taps.gpu.host_copies import HostCopies
from inference_svc.taps.gpu.kernels import encodings, features
from residuum.wire.rows.encodings import RANDOM_PROJECTIONS, SAE
from residuum.wire.sae import JUMP_RELU, RELU, TOP_K
from tests.inference.taps.encodings.encoder_cases import Case, cases
from tests.inference.taps.gpu.copies_without_gpu import without_gpu

GUARD = 64
"""Bytes before and after the payload, which must not change."""

ODD = 35
"""The width whose rows are encoded in chunks."""

UNUSED = -77.0

ACTIVATIONS = (RELU, 0), (JUMP_RELU, 0), (TOP_K, 5)
"""Those of sparse autoencoders. TOP_K leaves fewer features above 0 than are kept."""

memory = np.zeros(1 << 16, dtype=np.uint8)


def main() -> None:
    """Encode every case twice: in one pass, and in parts through buffers that are too small for the case.

    Features and random projections are computed by torch's product, and by the kernel for devices on which torch rounds
    factors to TF32.
    """
    whole = encodings._CHUNK
    for case in cases(((48, 16), (ODD, 7))):
        encodings._CHUNK = 32 if case.form.width == ODD else whole
        check(case, encoder_with(1 << 16))
        # With the axis BY_DIMENSION, the rows of a unit are always encoded together.
        if not case.form.prefix_bytes and case.name.startswith("random"):
            row_bytes = max(case.form.row_bytes, 4 * case.form.dimensions)
            check(case, encoder_with(4 * (2 * row_bytes // 4 + 1)))
            check(case, encoder_with(4 * (20 * row_bytes // 4 + 1)))
        if case.form.encoding == SAE:
            check_together(case, encoder_with(1 << 16))
            if case.rows.dtype == torch.float32 and case.name.startswith("random"):
                for activation in ACTIVATIONS:
                    check_features(case._replace(activation=activation))
            with (
                mock.patch.object(sae_encoder, "rounds_factors", return_value=True),
                mock.patch.object(sae_encoder, "_KERNEL_FEATURES", 48),
            ):
                check(case, encoder_with(1 << 16))
        if case.form.encoding in RANDOM_PROJECTIONS and case.rows.dtype == torch.float32:
            with (
                mock.patch.object(gpu_encoder, "rounds_factors", return_value=True),
                mock.patch.object(torch, "mm", side_effect=AssertionError("torch's product")),
            ):
                check(case, encoder_with(1 << 16))


def encoder_with(staged_bytes: int, sums: int = 1 << 16) -> GpuEncoder:
    """Return an encoder with a buffer for as many sums. The numbers after it must not change; see `check`."""
    encoder = GpuEncoder(torch.device("cpu"), HostCopies(), staged_bytes, 4 * 2 * sums)
    encoder._sums = encoder._sums.fill_(UNUSED)[:sums]
    return encoder


def sums_are_inside(encoder: GpuEncoder) -> bool:
    whole = encoder._sums.as_strided((2 * len(encoder._sums),), (1,))
    return bool((whole[len(encoder._sums) :] == UNUSED).all())


def check(case: Case, encoder: GpuEncoder) -> None:
    size = case.form.payload_bytes(*case.rows.shape[:2])
    memory[:] = 0xEE
    encoder.encode(case.rows, case.form, case.basis(), memory.ctypes.data + GUARD)
    assert sums_are_inside(encoder)
    assert (memory[:GUARD] == 0xEE).all()
    assert (memory[GUARD + size :] == 0xEE).all()
    case.check(memory[GUARD : GUARD + size].copy(), exact_bfloat16=False)  # the interpreter truncates to bfloat16


def check_features(case: Case) -> None:
    """Encode a block through a buffer for one row, for two, and for all but one, and divide blocks into groups."""
    for rows in (1, 2, case.rows.shape[1] - 1):
        check(case, encoder_with(1 << 16, rows * sums_of_row(case)))
    check_together(case, encoder_with(1 << 16, 10 * sums_of_row(case)))
    assert groups(case, encoder_with(1 << 16)) == [4]
    # Of 15, 4, 6 and 5 rows, those of 4 and 6 are one group if there is room for ten rows.
    for less, expected in ((0, [1, 2, 1]), (1, [1, 1, 1, 1])):
        assert groups(case, encoder_with(10 * case.form.row_bytes - less)) == expected
        assert groups(case, encoder_with(1 << 16, 10 * sums_of_row(case) - less)) == expected
        with mock.patch.object(gpu_encoder, "GROUP_ELEMENTS", 10 * case.form.width - less):
            assert groups(case, encoder_with(1 << 16)) == expected


def groups(case: Case, encoder: GpuEncoder) -> list[int]:
    """Return of how many blocks each group is."""
    basis = case.basis()
    blocks = [FeatureRows(rows, case.form, basis, 0) for rows in blocks_of(case)]
    return [len(group) for group in encoder.divide(blocks)]


def blocks_of(case: Case) -> list[torch.Tensor]:
    return [case.rows, case.rows[:1, 1:], case.rows[:, :2], case.rows[2:]]


def sums_of_row(case: Case) -> int:
    """Return how many numbers a row takes in the buffer for sums: its outputs, and two for each candidate."""
    wanted = case.activation[1] or case.form.dimensions
    assert case.form.features < features._CHUNK, "one lane for each feature"
    return case.form.features + 2 * min(case.form.features, 2 * wanted - 1)


def check_together(case: Case, encoder: GpuEncoder) -> None:
    """Blocks that are encoded together have the same features as each alone."""
    basis, first = case.basis(), memory.ctypes.data + GUARD
    rows = blocks_of(case)
    blocks: list[FeatureRows] = []
    ends = [GUARD]
    memory[:] = 0xEE
    for part in rows:
        blocks.append(FeatureRows(part, case.form, basis, first + ends[-1] - GUARD))
        ends.append(ends[-1] + case.form.payload_bytes(*part.shape[:2]))
    divided = list(encoder.divide(blocks))
    assert [block.address for group in divided for block in group] == [block.address for block in blocks]
    for group in divided:
        encoder.encode_features(group)
    assert sums_are_inside(encoder)
    together = memory.copy()
    assert (together[:GUARD] == 0xEE).all()
    assert (together[ends[-1] :] == 0xEE).all()
    case.check(together[GUARD : ends[1]], exact_bfloat16=False)
    for start, part in zip(ends[1:-1], rows[1:], strict=True):
        end = start + case.form.payload_bytes(*part.shape[:2])
        encoder_with(1 << 16).encode(part, case.form, basis, memory.ctypes.data + start)
        got, alone = (case.form.split(data[start:end], *part.shape[:2])[1] for data in (together, memory))
        for name in got.dtype.names:
            np.testing.assert_allclose(got[name], alone[name], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    with without_gpu():
        main()
