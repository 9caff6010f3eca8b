from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.__main__ import attack, idle_alone


@pytest.mark.slow
def test_attacks_take_no_more_memory_than_the_settings_say(tmp_path: Path) -> None:
    assert attack(tmp_path / "store")


@pytest.mark.slow
def test_a_thousand_streams_that_wait_are_cheap(tmp_path: Path) -> None:
    assert idle_alone(tmp_path / "store")
