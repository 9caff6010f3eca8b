"""The folder of the examples' model."""

from __future__ import annotations

import sys

from scripts.fetch_model import NAME, cache


def default_model() -> str:
    """Return the folder that `make model` fills. If it is missing, exit with that advice."""
    folder = cache() / "models" / NAME
    if not folder.is_dir():
        sys.exit(f"No model in {folder}. Run `make model`, or name a model with --model.")
    return str(folder)
