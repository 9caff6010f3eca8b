"""The error that the startup checks raise. Not in `vllm/`: some checks need no vLLM, whose import takes seconds."""

from __future__ import annotations


class UnsupportedEngineError(RuntimeError):
    """The engine's configuration or this machine would make captures inexact."""
