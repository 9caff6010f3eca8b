"""Models that tests of several folders serve, and the distribution of tests over processes. Heavy imports are late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import settings

from svc_common.memory import importing
from tests.light import (  # noqa: F401 - hooks
    pytest_addoption,
    pytest_ignore_collect,
    pytest_pycollect_makemodule,
    pytest_runtest_makereport,
)

if TYPE_CHECKING:
    from collections.abc import Generator

settings.register_profile("untimed", deadline=None)  # a deadline would measure what else the machine does
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process. If several processes share the tests, let each engine use any free core.

    Otherwise vLLM binds the workers of all engines to the same cores, where their threads wait for each other.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by a background shell, and inherited by children
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # By default, structlog spends a quarter of a second on each traceback.
    *others, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*others, renderer])
    # Otherwise torch asks the compiler, with several programs for each graph, which vectors the processor has.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if hasattr(config, "workerinput"):
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage in what the tests import: torch, vLLM and transformers are a million objects."""
    with importing():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by the engine that they share (`make test`)."""
    from tests.sharing import SharingByEngine

    return SharingByEngine(config, log)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real language model, unpacked if necessary."""
    script = Path(__file__).parent.parent / "scripts" / "fetch_model.py"
    made = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_llama(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama in float32."""
    from tests.reference.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama", smollm2)


@pytest.fixture(scope="module")
def shared_memory() -> Iterator[None]:
    """Lets a module's stores and clients use shared memory, also if the environment of the tests switches it off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RESIDUUM_SHARED_MEMORY", raising=False)
        yield
