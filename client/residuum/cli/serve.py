"""`residuum serve`: what the distribution residuum-server does, if it is installed."""

from __future__ import annotations

import argparse
from pathlib import Path

from residuum.cli.output import Output
from residuum.serving import installed_server


def run(options: argparse.Namespace, output: Output) -> int:
    """Start both services, and stop them when told to."""
    try:
        server = installed_server()
    except RuntimeError as error:
        output.error(str(error))
        return 1
    data = Path(options.data) if options.data else None
    code: int = server.main(model=options.model, data=data, temporary=options.temporary, flags=options.flags)
    return code
