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
from inference_svc.taps.gpu.kernels import encodings
from residuum.wire.encodings import RANDOM_PROJECTIONS, SAE
from tests.inference.taps.encodings.encoder_cases import Case, cases
from tests.inference.taps.gpu.copies_without_gpu import without_gpu

GUARD = 64
"""Bytes before and after the payload, which must not change."""

ODD = 35
"""The width whose rows are encoded in chunks."""

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
            check_together(case)
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


def encoder_with(staged_bytes: int) -> GpuEncoder:
    return GpuEncoder(torch.device("cpu"), HostCopies(), staged_bytes)


def check(case: Case, encoder: GpuEncoder) -> None:
    size = case.form.payload_bytes(*case.rows.shape[:2])
    memory[:] = 0xEE
    encoder.encode(case.rows, case.form, case.basis(), memory.ctypes.data + GUARD)
    assert (memory[:GUARD] == 0xEE).all()
    assert (memory[GUARD + size :] == 0xEE).all()
    case.check(memory[GUARD : GUARD + size].copy(), exact_bfloat16=False)  # the interpreter truncates to bfloat16


def check_together(case: Case) -> None:
    """Blocks that are encoded together have the same features as each alone, also through buffers for few rows."""
    basis = case.basis()
    small = max(case.form.row_bytes, 4 * len(basis.biases))
    rows = [case.rows, case.rows[:1, 1:], case.rows[:, :2], case.rows[2:]]
    for size, groups in ((1 << 16, 1 if basis.chosen is None else 4), (4 * -(-small // 4) * 8, None)):
        encoder, first = encoder_with(size), memory.ctypes.data + GUARD
        blocks: list[FeatureRows] = []
        ends = [GUARD]
        memory[:] = 0xEE
        for part in rows:
            blocks.append(FeatureRows(part, case.form, basis, first + ends[-1] - GUARD))
            ends.append(ends[-1] + case.form.payload_bytes(*part.shape[:2]))
        divided = list(encoder.divide(blocks))
        assert [block.address for group in divided for block in group] == [block.address for block in blocks]
        assert groups is None or len(divided) == groups
        for group in divided:
            encoder.encode_features(group)
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
