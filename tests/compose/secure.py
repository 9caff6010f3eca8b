"""Round `secure`: several stores (profile sharded) with TLS and tokens (deploy/compose.tls.yaml), not compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import residuum
from residuum.wire.placement import first_rank
from tests.compose import containers, steps
from tests.compose.outcome import FailedError, expect
from tests.compose.project import Project
from tests.security.certificates import LOOPBACK, Authority

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.compose.outcome import Outcome

FILES = ("compose.yaml", "deploy/compose.tls.yaml")
SHARDS = {"a": "store-a", "b": "store-b"}
"""The services of the stores, by the names that placement uses."""
SERVICES = (*SHARDS.values(), "inference-sharded")


def run(outcome: Outcome, variables: dict[str, str]) -> None:
    """Run the round with these variables for `docker compose`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        token = _fill(folder / "tls")
        own = {"RESIDUUM_TLS_DIR": str(folder / "tls"), "RESIDUUM_ENFORCE_EAGER": "true"}
        ca = folder / "tls" / "common" / "ca.pem"
        with Project(FILES, {**variables, **own}) as project:
            outcome.sizes.update(project.build(*SERVICES))
            project.up("inference-sharded")
            outcome.say("up, and healthy: TLS, tokens, two stores")
            containers.check_confinement(project, SERVICES, outcome)
            _keeps_the_token_from_stores(project)
            endpoint = project.endpoint("inference-sharded")
            _refuses_strangers(endpoint, ca)
            environment = {**os.environ, "RESIDUUM_TLS_CA": str(ca), "RESIDUUM_TOKEN": token}
            with residuum.Client(endpoint, tls=residuum.TLS(ca=ca), token=token) as client:
                _use(client, project, endpoint, folder, environment, outcome)
            containers.take_down(project, outcome)


def _fill(folder: Path) -> str:
    """Make certificates and tokens as in deploy/README.md; return the client's token."""
    common, inference = folder / "common", folder / "inference"
    Authority(common).issue("server", names=(*LOOPBACK, *SERVICES))
    inference.mkdir()
    tokens = str(common / "tokens.toml")
    own = _token("--tenant", "*", "--rights", "write", "--append", tokens)
    (inference / "store.token").write_text(own)
    theirs = _token("--tenant", "alice", "--rights", "generate,read", "--append", tokens)
    for path in (folder.parent, folder, *folder.rglob("*")):  # the containers run as another user
        path.chmod(0o755 if path.is_dir() else 0o644)
    return theirs


def _token(*arguments: str) -> str:
    command = [sys.executable, "-m", "residuum", "token", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _keeps_the_token_from_stores(project: Project) -> None:
    """Check that only the inference service's container has the token that may write as any tenant."""
    for service in SERVICES:
        mounts = {mount["Destination"] for mount in project.inspect(service)["Mounts"]}
        expect(("/store-token" in mounts) is (service not in SHARDS.values()), f"{service} has {', '.join(mounts)}")
        common = project.execute(service, "ls", "/tls").split()
        expect("tokens.toml" in common and "store.token" not in common, f"{service} has {', '.join(common)} in /tls")


def _refuses_strangers(endpoint: str, ca: Path) -> None:
    """Check that connections without TLS and callers without a token are refused."""
    trusting = residuum.TLS(ca=ca)
    for what, refusal, arguments in (
        ("without TLS", residuum.Unreachable, {"tls": False}),
        ("without a token", residuum.Unauthenticated, {"tls": trusting}),
        ("with an unknown token", residuum.Unauthenticated, {"tls": trusting, "token": "residuum-nobodys"}),
    ):
        with residuum.Client(endpoint, **arguments) as client:
            try:
                client.info()
            except refusal:
                continue
            raise FailedError(f"a caller {what} was served")


def _use(
    client: residuum.Client,
    project: Project,
    endpoint: str,
    folder: Path,
    environment: Mapping[str, str],
    outcome: Outcome,
) -> None:
    outcome.say(steps.run_command(endpoint, environment, "doctor").splitlines()[-1])
    acts = steps.capture_all(client, "first", outcome)
    steps.pull(endpoint, acts, folder, environment, outcome)
    names = ["first"]
    for shard, service in SHARDS.items():
        name = next(_names_of(shard))
        names.append(name)
        steps.survive(client, project, service, name, lambda service=service: steps.crash(project, service), outcome)
    held = {store.store: sum(store.captures.values()) for store in client.stats()}
    expect(len(held) == len(SHARDS) and all(held.values()), f"captures are not in both stores: {held}")
    steps.delete(client, endpoint, names, environment, outcome)


def _names_of(shard: str) -> Iterator[str]:
    """Yield capture IDs that the contract's rule places on a store."""
    for number in range(1000):
        name = f"killed-{number}"
        if first_rank(SHARDS, name) == shard:
            yield name
