"""Starts the `residuum` command like a shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def environment(endpoint):
    return {**os.environ, "PYTHONPATH": str(ROOT / "client"), "RESIDUUM_ENDPOINT": endpoint, "COLUMNS": "120"}


def command(*arguments):
    return [sys.executable, "-c", "import sys; from residuum.cli import main; sys.exit(main())", *arguments]
