"""`make test-compose`: compose.yaml on a real container engine, with the client outside of it.

    python -m tests.compose                      both rounds
    python -m tests.compose --only plain         compose.yaml unchanged
    python -m tests.compose --only secure        several stores, with TLS and tokens (profile sharded, compose.tls.yaml)

Each round builds the images and starts all services with its own project name and ports. It uses them, kills the store
during a capture, stops everything, and checks that nothing is left. The images are kept for the next run. The last line
has the counts of captured and recovered rows. The exit status is 0 if all checks passed.

The engine is the one that `docker` reaches. If there is none, RESIDUUM_CONTAINER_ENGINE may name a program that starts
one: see tests/compose/engine.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.compose import engine, plain, secure
from tests.compose.outcome import FailedError, Outcome
from tests.compose.project import DockerError

ROUNDS = {"plain": plain.run, "secure": secure.run}


def main() -> int:
    """Run the rounds; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compose", description="Test compose.yaml on a real container engine."
    )
    parser.add_argument("--only", choices=ROUNDS, help="one of the rounds (default: all)")
    parser.add_argument("--eager", action="store_true", help="start sooner, without compiling (default: compile)")
    options = parser.parse_args()
    if program := os.environ.get(engine.VARIABLE):
        with engine.brought_up(program) as (prefix, environment):
            # Run this program again in the network in which the published ports are reachable.
            command = [*prefix, sys.executable, "-m", "tests.compose", *sys.argv[1:]]
            return subprocess.run(command, env=environment, check=False).returncode
    outcome = Outcome()
    try:
        engine.check()
        for name in [options.only] if options.only else ROUNDS:
            outcome.say(f"== {name}")
            ROUNDS[name](outcome, {"RESIDUUM_ENFORCE_EAGER": "true"} if options.eager else {})
    except (DockerError, FailedError) as error:
        print(f"COMPOSE FAILED: {error}", flush=True)
        return 1
    print(f"COMPOSE OK: {outcome}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
