"""The worker's encoders agree with the reference in numpy: on a CPU, and the GPU's kernels in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from inference_svc.taps.cpu import encoder
from inference_svc.taps.encodings.check import CannotEncodeError, _same_features, check_encodings
from inference_svc.taps.encodings.signs import SignCache
from residuum.wire.rows.encodings import ENCODINGS, SAE, RowFormat
from residuum.wire.rows.projection import projection_signs
from svc_common.launcher import ROOT
from tests import encoding_cases
from tests.encoding_cases import F32
from tests.inference.taps.encodings.encoder_cases import DTYPES, cases
from tests.inference.taps_support import CPU


def encode(rows, form, basis):
    payload = np.full(form.payload_bytes(*rows.shape[:2]), 0xEE, dtype=np.uint8)
    encoder.encode(rows, form, basis, torch.from_numpy(payload).view(len(rows), -1))
    return payload


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_encoded_as_the_contract_says(dtype):
    for case in cases():
        if case.rows.dtype == dtype:
            case.check(encode(case.rows, case.form, case.basis()))


def test_large_blocks_are_encoded_in_groups(monkeypatch):
    monkeypatch.setattr(encoder, "_GROUP_ELEMENTS", 500)
    for case in cases(((48, 16),)):
        case.check(encode(case.rows, case.form, case.basis()))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["encodings", "features"])
def test_the_kernels_of_a_gpu_do_the_same_interpreted(kernels):
    program = f"tests.inference.taps.encodings.interpreted_{kernels}"
    subprocess.run([sys.executable, "-m", program], cwd=ROOT, check=True, timeout=240)


def test_signs_are_those_of_the_contract_and_kept_within_bounds():
    cache = SignCache(40, CPU, max_bytes=3 * 40 * 10 * 4)
    first = cache.get(7, 10, torch.float32)
    np.testing.assert_array_equal(first.numpy(), projection_signs(7, 40, 10))
    for seed in (8, 9):
        cache.get(seed, 10, torch.float32)
    assert cache.get(7, 10, torch.float32) is first
    cache.get(10, 10, torch.float32)
    assert cache.nbytes == 3 * 40 * 10 * 4
    assert cache.get(7, 10, torch.float32) is first, "the least recently used one was evicted"
    assert cache.get(1, 40, torch.float32).nbytes > 3 * 40 * 10 * 4, "one matrix may exceed the limit"
    assert cache.nbytes == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_startup_check_passes(dtype):
    check_encodings(70, dtype, CPU, SignCache(70, CPU), encode, with_saes=True)


def test_features_are_checked_only_if_captures_may_keep_them():
    seen = set()

    def noted(rows, form, basis):
        seen.add(form.encoding)
        return encode(rows, form, basis)

    check_encodings(70, torch.float32, CPU, SignCache(70, CPU), noted, with_saes=False)
    assert seen == {*ENCODINGS.values()} - {SAE}


@pytest.mark.parametrize("index", range(12))
def test_the_startup_check_detects_each_wrong_encoder(index):
    """Flip one bit in the result of each encoding in turn."""
    seen = []

    def wrong(rows, form, basis):
        payload = encode(rows, form, basis)
        if form not in seen:
            seen.append(form)
        if seen.index(form) == index:
            payload[2] ^= 0x40
        return payload

    with pytest.raises(CannotEncodeError, match="not what the contract says"):
        check_encodings(70, torch.float32, CPU, SignCache(70, CPU), wrong, with_saes=True)
    assert len(seen) == index + 1


def test_the_startup_check_wants_each_feature_once_and_no_feature_with_the_value_0():
    form = RowFormat(SAE, 4, F32, 3, features=5)
    one = encoding_cases.encoder(5, 4)
    one.weights[:] = 0
    one.biases[:] = [3, 0, 3, -1, 0]  # two are equal, and no third is above 0
    rows = np.zeros((1, 1, 4), np.float32)

    def is_same(numbers, values=(3, 3, 0)):
        encoded = np.concatenate([np.array(numbers, "<u4").view(np.uint8), np.array(values, "<f4").view(np.uint8)])
        return _same_features(form, encoded, rows, one)

    assert is_same([0, 2, 5])
    assert is_same([2, 0, 5])
    assert not is_same([0, 0, 5])
    assert not is_same([0, 2, 1])
    assert not is_same([0, 2, 6])
    assert not is_same([0, 5, 5], (3, 0, 0))


def test_the_startup_check_encodes_with_and_without_thresholds():
    """A GPU has a kernel for each."""
    seen = []

    def noted(rows, form, basis):
        if form.encoding == SAE:
            seen.append((basis.threshold is not None, rows.shape[1]))
        return encode(rows, form, basis)

    check_encodings(70, torch.float32, CPU, SignCache(70, CPU), noted, with_saes=True)
    assert seen == [(False, 3), (False, 16), (True, 3), (True, 16)]
