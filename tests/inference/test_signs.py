"""Signs of random projections in a worker: made beside the steps, and there as long as a request needs them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from inference_svc.taps.encodings import signs as signs_module
from inference_svc.taps.encodings.signs import SignCache, Signs
from inference_svc.taps.plan import RequestPlan
from residuum.v1 import capture_pb2
from residuum.wire.projection import projection_signs
from tests.inference.taps_support import CPU
from tests.inference.test_encoding_sink import HIDDEN, Engine, capture, encoding_of

WIDTH, SIZE = 16, 8
EACH = 4 * WIDTH * SIZE
LONG = 20.0


@pytest.fixture
def makers(monkeypatch):
    """The names of the threads that make signs, one for each matrix."""
    names = []

    def watched(*arguments):
        names.append(threading.current_thread().name)
        return projection_signs(*arguments)

    monkeypatch.setattr(signs_module, "projection_signs", watched)
    return names


def wait_for(cache_keep):
    """Ask again until all is there, as the service does."""
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
    """The service lets them go when the request has ended; the worker hears of that end a step later."""
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


def test_what_is_kept_does_not_go_for_others():
    cache = SignCache(WIDTH, CPU, max_bytes=2 * EACH)
    kept = [Signs(seed, SIZE, torch.float32) for seed in range(3)]
    wait_for(lambda: cache.keep(kept))
    held = [cache.get(*key) for key in kept]
    np.testing.assert_array_equal(held[1].numpy(), projection_signs(1, WIDTH, SIZE))
    for seed in range(10, 20):
        cache.get(seed, SIZE, torch.float32)
    assert all(cache.get(*key) is matrix for key, matrix in zip(kept, held, strict=True))
    assert cache.nbytes == 5 * EACH
    assert cache.keep([]) == []
    assert cache.nbytes == 2 * EACH


def test_signs_that_nobody_wants_any_more_are_not_made(makers, monkeypatch):
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


def test_a_matrix_that_cannot_be_made_is_told_and_tried_again(monkeypatch):
    def fail(*arguments):
        raise MemoryError("scripted")

    cache = SignCache(WIDTH, CPU)
    keys = [Signs(1, SIZE, torch.float32)]
    with monkeypatch.context() as patch:
        patch.setattr(signs_module, "projection_signs", fail)
        with pytest.raises(MemoryError, match="scripted"):
            wait_for(lambda: cache.keep(keys))
    wait_for(lambda: cache.keep(keys))
    assert cache.nbytes == EACH
