"""The services of one Ray actor (`residuum.ray.serve`): they end when the actor has ended, however it ended.

The actor runs this as a program, possibly with another Python than its own. What it wants is one line of JSON on the
program's input. Lines of JSON on its output are the answers: the address of the inference service, "" when it serves no
longer, and why it has failed. The program runs until the actor writes "stop", or its input ends because the actor has
died.
"""

from __future__ import annotations

import json
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.wire.tokens import token_hash
from svc_common.launcher import NO_FILE, ServiceFailedError, start_inference, start_store, stop_all, terminable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from svc_common.launcher import Service

_INFERENCE = "inference_svc"
_STOP = b"stop"
_POLL_SECONDS = 0.2
_GRACE = "--grace-seconds=2"
"""The job is over, so there are no requests to wait for."""


@dataclass(frozen=True)
class ServicesPlan:
    """What the actor wants."""

    model: str
    """The model to serve, a folder or a name."""
    host: str
    """The host that the services listen on: the node's address."""
    token: str
    """The token that the services require, and that the inference service sends to its stores."""
    store: str
    """The stores of the inference service, separated by commas; "" to start one here."""
    flags: tuple[str, ...]
    """Further flags of the inference service."""


def main(check: Callable[[ServicesPlan], None]) -> int:
    """Serve until the actor stops the services or dies. Return the exit code.

    Args:
        check: Raises `ServiceFailedError` if this Python cannot run what the actor wants.
    """
    actor = _Actor()
    plan = actor.plan()
    try:
        with terminable(), tempfile.TemporaryDirectory(prefix="residuum-", ignore_cleanup_errors=True) as folder:
            _check_model(plan.model)
            check(plan)
            _serve(plan, Path(folder), actor)
    except (KeyboardInterrupt, _ActorEndedError):
        return 0
    except ServiceFailedError as error:
        _answer(failed=str(error))
        return 1
    return 0


def _check_model(model: str) -> None:
    if Path(model).is_absolute() and not Path(model).exists():
        raise ServiceFailedError(
            f"the model folder {model} does not exist. Copy the model to all nodes, or use a disk that all nodes have, "
            "or its name on the Hugging Face hub."
        )


def _serve(plan: ServicesPlan, folder: Path, actor: _Actor) -> None:
    started: list[Service] = []
    try:
        for service in _start(plan, folder):
            started.append(service)
            # No timeout, because downloading a model may take long.
            service.wait_until_serving(float("inf"), others=started[:-1], waiting=lambda *_: actor.check())
        _answer(inference=started[-1].endpoint)
        while all(service.is_running for service in started):
            actor.check(_POLL_SECONDS)
        _answer(inference="")  # at once: stopping the other service takes a while
        ended = next(service for service in started if not service.is_running)
        raise ServiceFailedError(f"The {ended.name} service has ended. Its log ends:\n{ended.log_end()}")
    finally:
        if actor.has_died:  # a new one may start on the same GPUs at once
            for service in reversed(started):
                service.kill_group()
        else:
            stop_all(started)


def _start(plan: ServicesPlan, folder: Path) -> Iterator[Service]:
    """Start the store, if none is given, and the inference service, each after the one before serves."""
    tokens, token = folder / "tokens.toml", folder / "token"
    tokens.write_text(f'[[token]]\nhash = "{token_hash(plan.token)}"\ntenant = "*"\nrights = ["admin"]\n')
    token.write_text(plan.token)
    # Ray's nodes trust their network: Ray itself sends everything between them in plain text.
    guarded = [f"--tokens={tokens}", "--insecure"]
    stores = plan.store
    if not stores:
        store = start_store(folder, [*guarded, *NO_FILE], host=plan.host)
        yield store
        stores = store.endpoint
    flags = [*guarded, f"--store-token-file={token}", _GRACE, *plan.flags]
    yield start_inference(folder, plan.model, stores, flags, host=plan.host, module=_INFERENCE)


class _ActorEndedError(Exception):
    """The actor has died, or wants no more services."""


class _Actor:
    """The actor at the other end of the input."""

    def __init__(self) -> None:
        self.has_died = False
        self._input = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - Python's own stdin has a lock
        self._is_over = threading.Event()

    def plan(self) -> ServicesPlan:
        """Read what the actor wants. From now on, notice when it ends."""
        plan = json.loads(self._input.readline())
        threading.Thread(target=self._read, name="actor", daemon=True).start()
        return ServicesPlan(**{**plan, "flags": tuple(plan["flags"])})

    def check(self, seconds: float = 0.0) -> None:
        """Wait for some seconds.

        Raises:
            _ActorEndedError: The actor has died, or wants no more services.
        """
        if self._is_over.wait(seconds):
            raise _ActorEndedError

    def _read(self) -> None:
        self.has_died = self._input.readline().strip() != _STOP
        self._is_over.set()


def _answer(**answer: Any) -> None:
    with suppress(BrokenPipeError):  # the actor has died, which `_Actor` notices
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer to the actor
