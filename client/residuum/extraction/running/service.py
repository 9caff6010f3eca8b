"""One inference service of a job, and how many prompts it gets at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from residuum._async.client import AsyncClient

_FIRST_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
"""The pauses between two attempts to reach a service that is away, or that refuses every prompt."""
_GROWTH_SECONDS = 1.0
"""A service that has refused a prompt gets one more at once after this time without a refusal."""


@dataclass(eq=False)
class Service:
    """One inference service."""

    client: AsyncClient
    """A client of it and of its stores."""
    number: int = 0
    """Its number in the job."""
    running: int = 0
    """The prompts that it has now."""
    prompts: int = 0
    """The prompts that it has answered."""
    away_since: float | None = None
    """Since when it has answered no prompt. None: it answered the last one, or had none yet."""
    is_away: bool = False
    """Whether it gets no prompts at the moment."""
    room: float = math.inf
    """The most prompts that it gets at once. It is known once the service has refused one."""
    failures: int = field(default=0, repr=False)
    refusals: int = field(default=0, repr=False)
    """How often it has refused a prompt while it had no other one, since its last answer."""
    has_warned: bool = field(default=False, repr=False)
    """Whether the caller knows that it does so."""
    room_changed: float = field(default=0.0, repr=False)
    resumes: float = field(default=0.0, repr=False)
    """When it gets the next prompt after a refusal."""

    def takes_prompts(self, now: float) -> bool:
        """Return whether it gets another prompt now."""
        return not self.is_away and self.running < self.room and now >= self.resumes

    def note_answer(self, now: float) -> None:
        """Note that it has answered a prompt."""
        self.prompts += 1
        self.failures = self.refusals = 0
        self.away_since = None
        if now - self.room_changed > _GROWTH_SECONDS:
            self.room, self.room_changed = self.room + 1, now

    def note_refused(self, now: float) -> None:
        """Note that it has refused a prompt, which still counts as running. It gets no more than the others at once."""
        others = self.running - 1
        self.room, self.room_changed = max(1, min(self.room, others)), now
        if not others:
            self.away_since = now if self.away_since is None else self.away_since
            self.resumes = now + pause(self.refusals)
            self.refusals += 1


def pause(attempts: int) -> float:
    """Return the seconds until the next attempt."""
    return min(_FIRST_SECONDS * 2.0 ** min(attempts, 10), LONGEST_PAUSE_SECONDS)
