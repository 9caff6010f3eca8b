"""Where the examples' model lies."""

from __future__ import annotations

import sys

from scripts.fetch_model import NAME, cache


def default_model() -> str:
    """Return the folder that `make model` fills, or end the program with that advice."""
    folder = cache() / "models" / NAME
    if not folder.is_dir():
        sys.exit(f"There is no model in {folder}; run `make model`, or name another with --model.")
    return str(folder)
