from __future__ import annotations

import pytest

from tests.hostile.__main__ import attack_inference


@pytest.mark.slow
async def test_attacks_take_no_more_memory_than_the_settings_say() -> None:
    assert await attack_inference()
