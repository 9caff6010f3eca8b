"""Every name of vLLM that the product uses exists in the installed version. A failing test says which, and where.

The names come from the source: what is imported from vllm, attributes of vLLM's objects (an attribute of something
called `model_config` is one of `ModelConfig`), and methods of vLLM's workers that ours extend.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm import config
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
from vllm.v1.worker.gpu_worker import Worker

import inference_svc

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(inference_svc.__file__).parent
WORKERS = (Worker, CPUWorker)
RUNNERS = (RunnerV1, RunnerV2, CPUModelRunner)
OWNERS = {
    "scheduler_output": (SchedulerOutput,),
    "vllm_config": (config.VllmConfig,),
    "model_config": (config.ModelConfig,),
    "parallel_config": (config.ParallelConfig,),
    "scheduler_config": (config.SchedulerConfig,),
    "compilation_config": (config.CompilationConfig,),
    "pass_config": (config.compilation.PassConfig,),
    "worker": WORKERS,
    "runner": RUNNERS,
    "model_runner": RUNNERS,
    "llm": (AsyncLLM,),
    "_llm": (AsyncLLM,),
    "client": (DPLBAsyncMPClient,),
    "mixture": (MoERunner,),
    "router": (BaseRouter,),
}
"""The classes of what has this name in the product. One of them must have each attribute."""
OWN = {"_residuum"}
"""Attributes that the product adds."""
NOT_VLLM = {("servicer.py", "runner"), ("vllm_serve/front.py", "runner"), ("shipping/shipper/process.py", "client")}
"""Objects of the product with such a name."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(ROOT.rglob("*.py")):
        yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def imports() -> set[tuple[str, str, str]]:
    """Return (file, module, name) of each name that is imported from vllm; the name is empty for a module."""
    found = set()
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(file, node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(file, alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return found


def attributes() -> set[tuple[str, str, str]]:
    """Return (file, name of the object, attribute) of each attribute of an object of vLLM."""
    found = set()
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr not in OWN:
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name in OWNERS and (file, name) not in NOT_VLLM:
                    found.add((file, name, node.attr))
    return found


def extended() -> set[tuple[str, str]]:
    """Return (file, method) of each method of a worker that ours calls as `super().method(...)`."""
    return {
        (file, node.attr)
        for file, tree in sources()
        for node in ast.walk(tree)
        if file.endswith("worker.py") and isinstance(node, ast.Attribute)
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
    }


@functools.cache
def names_of(cls: type) -> set[str]:
    """Return the attributes of a class and of its instances."""
    found = {*dir(cls), *inspect.get_annotations(cls)}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "vllm":
            nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
            found |= {
                node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            }
    return found


def test_names_are_found() -> None:
    assert ("engine/engine.py", "vllm.v1.engine.async_llm", "AsyncLLM") in imports()
    assert ("taps/vllm/limits.py", "parallel_config", "use_ubatching") in attributes()
    assert ("taps/vllm/worker.py", "load_model") in extended()


@pytest.mark.parametrize(("file", "module", "name"), sorted(imports()))
def test_an_imported_name_exists(file: str, module: str, name: str) -> None:
    imported = importlib.import_module(module)
    assert not name or hasattr(imported, name), f"{file} imports {name} from {module}, which does not have it"


@pytest.mark.parametrize(("file", "owner", "name"), sorted(attributes()))
def test_an_attribute_exists(file: str, owner: str, name: str) -> None:
    classes = OWNERS[owner]
    has = [cls for cls in classes if name in names_of(cls)]
    assert has, f"{file} uses {owner}.{name}, which {' and '.join(cls.__name__ for cls in classes)} do not have"


@pytest.mark.parametrize(("file", "name"), sorted(extended()))
def test_a_method_of_a_worker_exists(file: str, name: str) -> None:
    for worker in WORKERS:
        assert callable(getattr(worker, name, None)), f"{file} extends {name}, which {worker.__name__} does not have"
