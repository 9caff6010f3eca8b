"""Checks of the containers, from the engine's description and from inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.compose.outcome import Outcome, expect
from tests.compose.project import DockerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.compose.project import Project

USER = "10001"
_CLEAN_ENDS = {0, 143}
"""Exit codes after SIGTERM. 143 is that of init for a process without a handler for the signal."""


def check_confinement(project: Project, services: Iterable[str], outcome: Outcome) -> None:
    """Check that each service runs as an unprivileged user without capabilities, on a read-only root file system."""
    for service in services:
        host = project.inspect(service)["HostConfig"]
        expect(host["ReadonlyRootfs"], f"{service} can write its root")
        expect(host["CapDrop"] == ["ALL"] and not host["CapAdd"], f"{service} has capabilities")
        expect("no-new-privileges:true" in host["SecurityOpt"], f"{service} can gain privileges")
        expect(host["Memory"] > 0 and host["PidsLimit"] > 0, f"{service} has no limits")
        expect(project.execute(service, "id", "-u").strip() == USER, f"{service} runs as another user")
        for place in ("/", "/usr", "/etc"):
            expect(_fails(project, service, "touch", f"{place}/here"), f"{service} can write to {place}")
    outcome.say("confined: user 10001, read-only root, no capabilities, no new privileges, limits")


def check_light_store(project: Project, store: str, outcome: Outcome) -> None:
    """Check that the store's image has no packages that only models need."""
    for package in ("torch", "vllm", "transformers"):
        expect(_fails(project, store, "python", "-c", f"import {package}"), f"the store's image has {package}")
    outcome.say("the store's image has neither torch nor vLLM")


def take_down(project: Project, outcome: Outcome) -> None:
    """Stop everything within the grace periods, remove it, and check that nothing is left."""
    for service, code in project.stop().items():
        expect(code in _CLEAN_ENDS, f"{service} ended with {code} when it was asked to stop")
    project.down()
    expect(not project.leftovers(), f"left behind: {', '.join(project.leftovers())}")
    outcome.say("stopped cleanly; no container, volume or network is left")


def _fails(project: Project, service: str, *command: str) -> bool:
    try:
        project.execute(service, *command)
    except DockerError:
        return True
    return False
