"""Round `plain`: compose.yaml unchanged, with store and inference service on a CPU, compiled, without tokens."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import residuum
from tests.compose import containers, steps
from tests.compose.outcome import FailedError, expect
from tests.compose.project import DockerError, Project

if TYPE_CHECKING:
    from tests.compose.outcome import Outcome

SERVICES = ("store", "inference")
_REFUSAL_SECONDS = 60.0


def run(outcome: Outcome, variables: dict[str, str]) -> None:
    """Run the round with these variables for `docker compose`."""
    with Project(variables=variables) as project, tempfile.TemporaryDirectory() as scratch:
        outcome.sizes.update(project.build(*SERVICES))
        outcome.say(f"built: {outcome.sizes}")
        project.up()
        outcome.say("up, and healthy")
        containers.check_confinement(project, SERVICES, outcome)
        containers.check_light_store(project, "store", outcome)
        endpoint = project.endpoint("inference")
        with residuum.Client(endpoint) as client:  # finds the store by the address from the service
            _use(client, project, endpoint, Path(scratch), outcome)
        containers.take_down(project, outcome)
    with Project(variables={**variables, "RESIDUUM_BIND": "0.0.0.0"}) as project:
        _refuses_to_be_open(project, outcome)


def _refuses_to_be_open(project: Project, outcome: Outcome) -> None:
    """Check that no service starts if a variable publishes its port to other machines without TLS."""
    for service in SERVICES:
        try:
            project.compose("run", "--rm", "--no-TTY", "--no-deps", service, timeout=_REFUSAL_SECONDS)
        except DockerError as error:
            expect("where the port is published, can be reached from other machines" in str(error), str(error))
        else:
            raise FailedError(f"{service} started although its port was published without TLS")
    outcome.say("published beyond this machine, without TLS: refused")


def _use(client: residuum.Client, project: Project, endpoint: str, folder: Path, outcome: Outcome) -> None:
    environment = dict(os.environ)
    outcome.say(steps.run_command(endpoint, environment, "doctor").splitlines()[-1])
    acts = steps.capture_all(client, "first", outcome)
    steps.steer(client, acts, outcome)
    steps.pull(endpoint, acts, folder, environment, outcome)
    crashed = steps.survive(client, project, "store", "crashed", lambda: steps.crash(project, "store"), outcome)
    killed = steps.survive(client, project, "store", "killed", lambda: steps.kill_container(project, "store"), outcome)
    expect(
        (crashed.token_ids == killed.token_ids).all() and steps.same_rows(crashed, killed),
        "the same request has different rows after the second kill",
    )
    expect(steps.same_rows(client.activations("first"), acts), "rows captured before the kills have changed")
    steps.delete(client, endpoint, ["first", "steered", "crashed", "killed"], environment, outcome)
