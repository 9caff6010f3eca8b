"""The `residuum` command."""

from residuum.cli.main import main

__all__ = ["main"]
