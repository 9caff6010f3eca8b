"""The `residuum` command-line program.

The commands for captures are here, next to what all commands share; `generation` and `services` have the others.
"""

from residuum.cli.main import main

__all__ = ["main"]
