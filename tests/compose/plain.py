"""compose.yaml as it stands: store and inference service on a CPU, compiled, nobody is asked who they are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import residuum
from tests.compose import containers, steps
from tests.compose.outcome import expect
from tests.compose.project import Project

if TYPE_CHECKING:
    from tests.compose.outcome import Outcome

SERVICES = ("store", "inference")


def run(outcome: Outcome, variables: dict[str, str]) -> None:
    """Run the round, with what is set for `docker compose`."""
    with Project(variables=variables) as project, tempfile.TemporaryDirectory() as scratch:
        outcome.sizes.update(project.build(*SERVICES))
        outcome.say(f"built: {outcome.sizes}")
        project.up()
        outcome.say("up, and healthy")
        containers.check_confinement(project, SERVICES, outcome)
        containers.check_light_store(project, "store", outcome)
        endpoint = project.endpoint("inference")
        with residuum.Client(endpoint) as client:  # finds the store by what the service says of it
            _use(client, project, endpoint, Path(scratch), outcome)
        containers.take_down(project, outcome)


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
        "the same request has other rows after another kill",
    )
    expect(steps.same_rows(client.activations("first"), acts), "what was captured before the kills has changed")
    steps.delete(client, endpoint, ["first", "steered", "crashed", "killed"], environment, outcome)
