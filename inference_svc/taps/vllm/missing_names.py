"""What the adapters do if vLLM lacks a name that they use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class IncompatibleEngineError(RuntimeError):
    """This version of vLLM lacks a name that the taps use. The message says which."""


def refuse_missing(runner: Any, vllm_version: str, names: Sequence[str]) -> None:
    """Refuse a model runner that lacks names.

    Args:
        runner: The model runner.
        vllm_version: The version of vLLM.
        names: The names that it lacks.

    Raises:
        IncompatibleEngineError: There are such names.
    """
    if names:
        raise IncompatibleEngineError(
            f"vLLM {vllm_version}: {type(runner).__name__} has no {' and no '.join(names)}, which residuum needs. "
            "Use a version of vLLM that residuum was tested with (see server/pyproject.toml)."
        )
