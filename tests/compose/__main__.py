"""`make test-compose`: compose.yaml on a real container engine, and the client outside of it.

    python -m tests.compose                      both rounds
    python -m tests.compose --only plain         compose.yaml as it stands
    python -m tests.compose --only secure        several stores, with TLS and tokens (profile sharded, compose.tls.yaml)

Each round builds the images, brings everything up under a project name and on ports of its own, uses it, kills the
store in mid-capture, takes everything down and looks for what is left. The images stay, so that the next run builds
what has changed. The last line says what was captured and recovered; the exit status is 0 if all was well.

What `docker` reaches is used. Where no engine is, RESIDUUM_CONTAINER_ENGINE may name a program that brings one up: see
tests/compose/engine.py.
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
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description="Try compose.yaml on a real engine.")
    parser.add_argument("--only", choices=ROUNDS, help="one of the rounds (default: all)")
    parser.add_argument("--eager", action="store_true", help="start sooner, without compiling (default: compile)")
    options = parser.parse_args()
    if program := os.environ.get(engine.VARIABLE):
        with engine.brought_up(program) as (prefix, environment):
            # Once more, where published ports can be reached.
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
