"""Signs of random projections in a worker: made in the background, and kept while a request needs them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from inference_svc.taps.encodings import signs as signs_module
from inference_svc.taps.encodings.projections import KEPT_BYTES
from inference_svc.taps.encodings.signs import IDLE_BYTES, IDLE_MATRICES, SignCache, Signs, max_sign_bytes
from inference_svc.taps.plan import RequestPlan
from residuum.v1 import capture_pb2
from residuum.wire.rows.projection import projection_signs
from tests.inference.taps.encodings.test_encoding_sink import HIDDEN, Engine, capture, encoding_of
from tests.inference.taps_support import CPU

WIDTH, SIZE = 16, 8
EACH = 4 * WIDTH * SIZE
LONG = 20.0


@pytest.fixture
def makers(monkeypatch):
    """The names of the threads that made signs, one for each matrix."""
    names = []

    def watched(*arguments):
        names.append(threading.current_thread().name)
        return projection_signs(*arguments)

    monkeypatch.setattr(signs_module, "projection_signs", watched)
    return names


def wait_for(cache_keep):
    """Ask again until all are ready, as the service does."""
    while not all(cache_keep()):
        threading.Event().wait(0.001)


@pytest.mark.parametrize("reduction", [capture_pb2.REDUCTION_NONE, capture_pb2.REDUCTION_MEAN])
@pytest.mark.parametrize("name", ["rp", "rp8"])
def test_no_step_makes_signs(makers, name, reduction):
    engine = Engine()
    encoding = encoding_of(name)
    plan = RequestPlan(20, capture(encoding, reduction))
    wanted = [(encoding.seed, encoding.dimensions, plan.capture.is_computed)]
    wait_for(lambda: engine.worker.sink.keep_signs(wanted))
    assert makers == ["residuum-signs"]
    engine.run(plan, 40)
    assert makers == ["residuum-signs"]
    assert engine.stored()


def test_signs_stay_until_the_last_block_of_their_request_has_left(makers):
    """The service drops the signs when the request has ended. The worker learns of the end one step later."""
    engine = Engine()
    encoding = encoding_of("rp")
    plan = RequestPlan(20, capture(encoding))
    wait_for(lambda: engine.worker.sink.keep_signs([(encoding.seed, encoding.dimensions, False)]))
    engine.compute(("a", 0, 20), admitted=[("a", plan)])
    engine.compute(("a", 20, 1))
    engine.worker.sink._signs._max_bytes = 0
    wait_for(lambda: engine.worker.sink.keep_signs([(99, encoding.dimensions, False)]))
    assert engine.worker.sink._signs.nbytes == 4 * HIDDEN * encoding.dimensions
    engine.compute(finished=["a"])
    assert makers == ["residuum-signs"] * 2
    assert max(position for _, _, position in engine.stored()) == 20


def test_kept_signs_are_not_evicted_for_others():
    cache = SignCache(WIDTH, CPU, max_bytes=2 * EACH)
    kept = [Signs(seed, SIZE, torch.float32) for seed in range(3)]
    wait_for(lambda: cache.keep(kept))
    held = [cache.get(*key) for key in kept]
    np.testing.assert_array_equal(held[1].numpy(), projection_signs(1, WIDTH, SIZE))
    for seed in range(10, 20):
        cache.get(seed, SIZE, torch.float32)
    cache.get(9, 4 * SIZE, torch.float32)  # a matrix larger than the limit for idle ones is not kept
    cache.get(20, SIZE, torch.float32)
    cache.get(21, SIZE, torch.float32)
    assert all(cache.get(*key) is matrix for key, matrix in zip(kept, held, strict=True))
    assert cache.nbytes == 5 * EACH
    assert cache.keep([]) == []
    assert cache.nbytes == 2 * EACH


def test_each_owner_keeps_its_own_signs():
    """API servers of one `vllm serve` each keep signs, and do not know those of the others."""
    cache = SignCache(WIDTH, CPU, max_bytes=0)
    mine, theirs = ([Signs(seed, SIZE, torch.float32)] for seed in (1, 2))
    wait_for(lambda: cache.keep(mine, owner=0))
    wait_for(lambda: cache.keep(theirs, owner=1))
    assert cache.keep(mine, owner=0) == cache.keep(theirs, owner=1) == [True]
    assert cache.nbytes == 2 * EACH
    cache.keep([], owner=0)
    assert cache.nbytes == EACH
    assert cache.keep(theirs, owner=1) == [True]


def test_an_error_is_told_to_the_owner_that_asked(monkeypatch):
    monkeypatch.setattr(signs_module, "projection_signs", fail)
    cache = SignCache(WIDTH, CPU)
    key = Signs(1, SIZE, torch.float32)
    cache.keep([key], owner=0)
    deadline = time.monotonic() + LONG
    while not cache._errors:
        assert time.monotonic() < deadline
        cache.keep([], owner=1)
        time.sleep(0.001)
    assert cache.keep([key], owner=0) == ["MemoryError"]


def test_signs_that_are_no_longer_needed_are_not_made(makers, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def slow(*arguments):
        began.set()
        assert go_on.wait(LONG)
        makers.append(arguments[0])
        return projection_signs(*arguments)

    monkeypatch.setattr(signs_module, "projection_signs", slow)
    cache = SignCache(WIDTH, CPU)
    keys = [Signs(seed, SIZE, torch.float32) for seed in range(100)]
    assert cache.keep(keys) == [False] * 100
    assert began.wait(LONG)
    cache.keep(keys[-1:])
    go_on.set()
    wait_for(lambda: cache.keep(keys[-1:]))
    assert makers == [0, 99]


def fail(*arguments):
    raise MemoryError("scripted")


def outcome(cache, *keys):
    """Ask for matrices until each was made or failed; return the first result of each."""
    told = {}
    while len(told) < len(keys):
        for key, state in zip(keys, cache.keep(keys), strict=True):
            if state:
                told.setdefault(key, state)
        threading.Event().wait(0.001)
    return [told[key] for key in keys]


def test_a_matrix_that_cannot_be_made_is_reported_and_retried(monkeypatch):
    cache = SignCache(WIDTH, CPU)
    key = Signs(1, SIZE, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(signs_module, "projection_signs", fail)
        assert outcome(cache, key) == ["MemoryError"]
    assert outcome(cache, key) == [True]
    assert cache.nbytes == EACH


def test_a_matrix_that_cannot_be_made_does_not_affect_others(monkeypatch):
    def picky(seed, *arguments):
        return fail() if seed == 1 else projection_signs(seed, *arguments)

    monkeypatch.setattr(signs_module, "projection_signs", picky)
    cache = SignCache(WIDTH, CPU)
    bad, good, other = (Signs(seed, SIZE, torch.float32) for seed in (1, 2, 3))
    assert outcome(cache, bad, good) == ["MemoryError", True]
    assert outcome(cache, other) == [True], "failures of matrices that are no longer needed are not reported"


def test_the_number_of_idle_matrices_is_limited():
    cache = SignCache(1, CPU)
    for seed in range(3 * IDLE_MATRICES):
        cache.get(seed, 1, torch.float32)
    assert cache.nbytes == 4 * IDLE_MATRICES


def test_the_signs_that_the_service_may_keep_fit_the_reserved_memory():
    cache = SignCache(2048, CPU)
    kept = [Signs(seed, 2048, torch.float32) for seed in range(KEPT_BYTES // (4 * 2048 * 2048))]
    wait_for(lambda: cache.keep(kept))
    for seed in range(100, 103):
        cache.get(seed, 1000, torch.float32)
    assert KEPT_BYTES < cache.nbytes <= max_sign_bytes(2048) == KEPT_BYTES + IDLE_BYTES
    assert max_sign_bytes(16384) == 4 * 16384**2 + IDLE_BYTES
    assert max_sign_bytes(16384, owners=2) == 2 * 4 * 16384**2 + IDLE_BYTES


@pytest.mark.parametrize("reduction", [capture_pb2.REDUCTION_NONE, capture_pb2.REDUCTION_MEAN])
def test_a_step_that_cannot_make_signs_loses_only_the_rows_of_that_request(monkeypatch, reduction):
    engine = Engine()
    monkeypatch.setattr(signs_module, "projection_signs", fail)
    engine.run(RequestPlan(20, capture(encoding_of("rp"), reduction)), 40)
    lost = [loss for _, loss in engine.worker.ring.losses]
    assert {position for loss in lost for position in loss.positions} == set(range(40))
    assert {loss.reason for loss in lost} == {capture_pb2.INCOMPLETE_REASON_WRITE_FAILED}
    assert "MemoryError" in lost[0].detail
    assert not engine.stored()
    engine.run(RequestPlan(20, capture()), 40)
    assert max(position for _, _, position in engine.stored()) == 39
