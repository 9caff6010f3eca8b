"""Growing memory is distinguished from noise."""

from __future__ import annotations

import random

import pytest

from bench.service.growth import Growth, growth_of

REQUESTS = list(range(0, 2001, 20))


def noise(size, seed=1):
    source = random.Random(seed)
    return [source.uniform(-size, size) for _ in REQUESTS]


def test_noise_around_a_constant_level_is_flat():
    growth = growth_of(REQUESTS, [500 + jitter for jitter in noise(4)])
    assert growth.is_flat
    assert growth.before_mib == pytest.approx(500, abs=4)


def test_growth_only_during_the_warm_up_is_flat():
    assert growth_of(REQUESTS, [300 + min(count, 600) for count in REQUESTS]).is_flat


@pytest.mark.parametrize("kib", [2, 100])
def test_growth_with_each_request_is_detected_in_noise(kib):
    jitters = noise(0.5)
    growth = growth_of(REQUESTS, [500 + count * kib / 1024 + jitters[at] for at, count in enumerate(REQUESTS)])
    assert not growth.is_flat
    assert growth.kib_per_request == pytest.approx(kib, rel=0.2)


def test_a_few_outliers_have_no_effect():
    mib = [500.0] * len(REQUESTS)
    mib[50] = mib[-1] = mib[-2] = 5000
    growth = growth_of(REQUESTS, mib)
    assert growth.is_flat
    assert growth.kib_per_request == 0


def test_a_step_late_in_the_run_is_not_flat():
    """Most pairs of samples do not contain the step, so only the level at the end shows it."""
    growth = growth_of(REQUESTS, [500.0 if count < 1700 else 520.0 for count in REQUESTS])
    assert growth.kib_per_request == 0
    assert not growth.is_flat


def test_large_processes_may_grow_by_a_share():
    assert Growth(before_mib=3000, after_mib=3025, kib_per_request=0).is_flat
    assert not Growth(before_mib=300, after_mib=325, kib_per_request=0).is_flat
    assert Growth(before_mib=300, after_mib=250, kib_per_request=-5).is_flat
