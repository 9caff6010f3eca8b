"""Models that several folders' tests serve, and which tests belong together. Nothing heavy is imported here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_FIRST = ("conformance", "tests/conformance/test_architectures", "integration")
"""The groups that take longest: begun first, so that no worker is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests belong together when several processes share them out (`make test`): those of one engine."""
    groups = {item: _group_of(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    ranks = {group: rank for rank, group in enumerate(_FIRST)}
    items.sort(key=lambda item: ranks.get(groups[item], len(ranks)))


def _group_of(item: pytest.Item) -> str:
    """Return the name of the tests with which one shares what is dear to start, its file by default."""
    fixtures = getattr(item, "fixturenames", ())
    if "services" in fixtures:
        return "integration"
    if {"engine", "stock_before"} & set(fixtures) and item.path.parent.name == "conformance":
        return "conformance"
    return item.path.relative_to(item.config.rootpath).with_suffix("").as_posix()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real language model, unpacked if it is not there yet."""
    script = Path(__file__).parent.parent / "scripts" / "fetch_model.py"
    made = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_llama(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama in float32."""
    from tests.reference.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama", smollm2)
