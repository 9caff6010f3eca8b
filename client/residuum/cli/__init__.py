"""The `residuum` command-line program."""

from residuum.cli.main import main

__all__ = ["main"]
