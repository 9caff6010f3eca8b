"""Reads the journal of `scheduler.JournalScheduler`: what the engine really computed, step by step."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path


def _named(name: str) -> str:
    """Return a name in the engine without the random number of its attempt: "r#0-…" for "r@7c3#0-…"."""
    return re.sub("@[0-9a-f]+(?=#)", "", name)


@dataclass(frozen=True)
class Step:
    """A step in which the engine computed tokens."""

    chunks: dict[str, tuple[int, int]]
    """The first position and the number of positions of each request, by its name without its attempt."""
    preempted: tuple[str, ...]
    """Requests that were preempted when the step was scheduled, named in the same way."""
    replica: int
    """The replica of the engine that computed it."""

    @property
    def is_mixed(self) -> bool:
        """Whether it computed single tokens of some requests and larger parts of others."""
        counts = {count for _, count in self.chunks.values()}
        return 1 in counts and len(counts) > 1


def pace_file(journal: Path) -> Path:
    """Return the path of the file that sets the shortest time of a step, in seconds. The file is optional."""
    return journal.with_name(f"{journal.name}.pace")


class Journal:
    """The steps of one engine, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._steps: list[Step] = []

    def steps(self) -> list[Step]:
        """Return all steps so far. A step is in the journal before any of its tokens is delivered."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                entry = json.loads(line)
                chunks = {_named(name): (first, count) for name, (first, count) in entry["chunks"].items()}
                self._steps.append(Step(chunks, tuple(map(_named, entry["preempted"])), entry["replica"]))
        return self._steps

    def steps_of(self, *request_ids: str) -> list[Step]:
        """Return the steps that computed positions of any of these requests."""
        prefixes = tuple(f"{request_id}#" for request_id in request_ids)
        return [step for step in self.steps() if any(name.startswith(prefixes) for name in step.chunks)]

    def chunks(self, request_id: str, sequence: int = 0) -> list[tuple[int, int]]:
        """Return (first position, number of positions) of each step that computed positions of a sequence."""
        prefix = f"{request_id}#{sequence}-"
        return [chunk for step in self.steps() for name, chunk in step.chunks.items() if name.startswith(prefix)]

    def preemptions(self, request_id: str) -> int:
        """Return how often a request was preempted."""
        prefix = f"{request_id}#"
        return sum(name.startswith(prefix) for step in self.steps() for name in step.preempted)
