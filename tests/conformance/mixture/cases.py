"""One random request: what is asked, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.conformance.mixture.captures import Asked, draw_capture
from tests.conformance.mixture.operations import Placed, draw_operations
from tests.conformance.mixture.probing import RuleDrawn, draw_probes, draw_rules

if TYPE_CHECKING:
    import residuum
    from tests.conformance.mixture.world import World

_FIRST_TOKEN = 3
"""Lower token IDs are special tokens."""
READS = ("async", "sync", "many", "rows", "file", "export", "parts")
"""The ways in which a capture is read, besides `activations` of the asyncio client."""


@dataclass
class Case:
    """A request."""

    number: int
    name: str
    """Its request ID."""
    prompt: list[int]
    after: int | None
    """Another request, whose prompt and reply until then come before the prompt."""
    delay: float
    """Seconds until it is sent."""
    sampling: dict[str, Any]
    capture: Asked | None
    steer: list[Placed]
    updates: list[tuple[int, list[Placed]]]
    """Changes of its steering, and after how many tokens each comes."""
    updatable: bool
    probes: list[residuum.Probe]
    rules: list[RuleDrawn]
    score_prompt: bool
    adapter: str | None
    life: str
    """"read": to its end; "abort": the client calls abort; "leave": the client drops the stream."""
    ends_after: int
    """The tokens after which it is aborted or left."""
    start: str
    """"plain"; "registered": it is registered first; "replaces": it replaces a capture of another request with the same
    ID, which the client has just left."""
    follows: bool
    """Whether its rows are followed while it generates."""
    read: str
    """One of `READS`."""

    @property
    def sequences(self) -> int:
        """How many replies it asks for."""
        return int(self.sampling.get("n", 1))


@dataclass
class Outcome:
    """What became of a request."""

    prompt: list[int] = field(default_factory=list)
    reply: residuum.Reply | None = None
    error: str = ""
    """The name of the error with which it ended, and its text."""
    changes: list[tuple[tuple[int, ...], list[Placed]]] = field(default_factory=list)
    """The changes that the service accepted: for each sequence the first position, and the operations."""
    refused_changes: list[str] = field(default_factory=list)
    streamed: dict[int, list[int]] = field(default_factory=dict)
    """The tokens that came until it ended, by sequence."""
    followed: list[Any] = field(default_factory=list)
    """Pieces of rows that came while it generated."""
    follow_error: str = ""


def draw_case(rng: np.random.Generator, world: World, number: int, name: str, span: float) -> Case:
    """Return a random request.

    Args:
        rng: The source of randomness.
        world: What it may use.
        number: Its number in the round.
        name: Its ID.
        span: Seconds within which all requests of the round are sent.
    """
    capture = draw_capture(rng, world) if rng.random() < 0.65 else None
    steer = draw_operations(rng, world) if rng.random() < 0.55 else []
    updatable = bool(rng.random() < 0.3)
    sampling = _draw_sampling(rng)
    most = int(sampling["max_tokens"])
    probes = draw_probes(rng, world) if rng.random() < 0.4 else []
    # Without a manifest, nothing says in which order a rule and an update at the same position were applied.
    rules = (
        draw_rules(rng, world, probes, most, may_steer=capture is not None or not updatable)
        if probes and most and rng.random() < 0.6
        else []
    )
    if capture is None:
        steering_rules = [rule for rule in rules if rule.operations]
        rules = [rule for rule in rules if not rule.operations or rule is steering_rules[0]]
    life = str(rng.choice(["read", "abort", "leave"], p=[0.74, 0.13, 0.13]))
    after = int(rng.integers(number)) if number > 4 and rng.random() < 0.35 else None
    return Case(
        number=number,
        name=name,
        prompt=[],
        after=after,
        delay=float(rng.uniform(0, span)),
        sampling=sampling,
        capture=capture,
        steer=steer,
        updates=[
            (int(rng.integers(0, 60)), draw_operations(rng, world) if rng.random() < 0.75 else [])
            for _ in range(int(rng.integers(0, 4)) if updatable else 0)
        ],
        updatable=updatable,
        probes=probes,
        rules=rules,
        score_prompt=bool(probes and (rng.random() < 0.5 or not most)),
        adapter=str(rng.choice(world.adapters)) if world.adapters and rng.random() < 0.6 else None,
        life=life,
        ends_after=int(rng.integers(0, 50)) if rng.random() < 0.75 else 0,
        start=str(rng.choice(["plain", "registered", "replaces"], p=[0.75, 0.1, 0.15])) if capture else "plain",
        follows=bool(capture and rng.random() < 0.25),
        read=str(rng.choice(READS)),
    )


def _draw_sampling(rng: np.random.Generator) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_tokens": int(rng.choice([0, 1, 2])) if rng.random() < 0.15 else int(rng.integers(3, 101)),
        "ignore_eos": bool(rng.random() < 0.8),
    }
    sampling |= _draw_limits(rng, sampling["max_tokens"])
    if rng.random() < 0.6:
        sampling["temperature"] = float(rng.uniform(0.5, 1.5))
        if rng.random() < 0.6:
            sampling["seed"] = int(rng.integers(1 << 31))
        if rng.random() < 0.2:
            sampling["n"] = int(rng.integers(2, 4))
        if rng.random() < 0.2:
            sampling["top_p"] = float(rng.uniform(0.5, 1))
    if rng.random() < 0.4:
        sampling["logprobs"] = int(rng.integers(0, 5))
    if rng.random() < 0.15:
        sampling["prompt_logprobs"] = int(rng.integers(0, 3))
    return sampling


def _draw_limits(rng: np.random.Generator, most: int) -> dict[str, Any]:
    """Return random reasons for another end or other tokens."""
    sampling: dict[str, Any] = {}
    if rng.random() < 0.2:
        sampling["stop_token_ids"] = [int(x) for x in rng.integers(_FIRST_TOKEN, 512, size=12)]
    if rng.random() < 0.15:
        sampling["stop"] = [f"t{int(rng.integers(100, 512))}" for _ in range(10)]
    if rng.random() < 0.1:
        sampling["min_tokens"] = int(rng.integers(most + 1))
    if rng.random() < 0.1:
        sampling |= {"repetition_penalty": 1.3, "logit_bias": {int(x): 3.0 for x in rng.integers(3, 512, size=5)}}
    if rng.random() < 0.1:
        sampling["truncate_prompt"] = int(rng.integers(1, 100))
    return sampling


def draw_round(rng: np.random.Generator, world: World, prefix: str, count: int, span: float) -> list[Case]:
    """Return random requests whose prompts share beginnings."""
    cases = [draw_case(rng, world, number, f"{prefix}-{number}", span) for number in range(count)]
    for case in cases:
        room = world.longest - int(case.sampling["max_tokens"]) - 1
        edges = rng.random() < 0.15
        size = min(int(rng.choice([1, 2, 31, 32, 33, 64, 65]) if edges else rng.integers(1, 201)), room)
        case.prompt = [int(token) for token in rng.integers(_FIRST_TOKEN, world.tokens, size=size)]
        if case.number and rng.random() < 0.65:  # most begin as another one
            _begin_as(rng, case, cases[int(rng.integers(case.number))], room)
    return cases


def _begin_as(rng: np.random.Generator, case: Case, other: Case, room: int) -> None:
    """Make a request begin as an earlier one. If its steering is the same too, it may read the prefix cache."""
    shared = int(rng.integers(1, len(other.prompt) + 1)) if rng.random() < 0.5 else len(other.prompt)
    case.prompt = [*other.prompt[:shared], *case.prompt][: max(len(case.prompt), min(shared + 3, room))]
    if rng.random() < 0.6:
        case.steer, case.adapter = other.steer, other.adapter
        case.updatable = case.updatable and rng.random() < 0.5
        case.updates = case.updates if case.updatable else []
        if case.after is not None:
            case.after = other.number
