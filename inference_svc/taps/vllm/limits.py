"""What the taps do not serve: refused when the engine starts, by name and with the reason, never found out later."""

from __future__ import annotations

from typing import Any


class UnsupportedEngineError(RuntimeError):
    """The engine is set up in a way in which captures would not be exact."""


def refuse_unsupported(config: Any) -> None:
    """Check vLLM's configuration.

    Args:
        config: A `VllmConfig`.

    Raises:
        UnsupportedEngineError: It asks for something under which rows would be missing, doubled or another token's.
    """
    passes = config.compilation_config.pass_config
    asked = {
        "speculative decoding: it computes rows of tokens that are then rejected": config.speculative_config,
        # vLLM 0.24 has this pass; 0.32 has dropped it.
        "sequence parallelism: no rank holds whole rows": getattr(passes, "enable_sp", False),
        "data parallelism: start one service for each replica": config.parallel_config.data_parallel_size > 1,
    }
    refused = [what for what, is_asked in asked.items() if is_asked]
    if refused:
        raise UnsupportedEngineError(f"residuum does not serve {'; nor '.join(refused)}")
