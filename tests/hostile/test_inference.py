from __future__ import annotations

import pytest

from tests.hostile.__main__ import attack_inference


@pytest.mark.slow
async def test_attacks_stay_within_the_configured_memory() -> None:
    assert await attack_inference()
