from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.__main__ import attack, idle_alone


@pytest.mark.slow
def test_attacks_stay_within_the_configured_memory(tmp_path: Path) -> None:
    assert attack(tmp_path / "store")


@pytest.mark.slow
def test_a_thousand_idle_streams_take_little_memory(tmp_path: Path) -> None:
    assert idle_alone(tmp_path / "store")
