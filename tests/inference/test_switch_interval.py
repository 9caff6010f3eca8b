import sys

import pytest

from inference_svc.taps.vllm.switch_interval import SWITCH_SECONDS, shorten_switch_interval


@pytest.fixture(autouse=True)
def _restored():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_threads_of_the_engines_process_take_turns_soon():
    shorten_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)


def test_a_shorter_interval_is_kept():
    sys.setswitchinterval(1e-5)
    shorten_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(1e-5)
