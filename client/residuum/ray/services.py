"""`residuum.ray.serve`: inference services as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from residuum.client import Client
from residuum.exceptions import BadCredentials, InvalidRequest, ResiduumError, Unavailable
from residuum.protocol.arguments import check_texts
from residuum.ray.service_actor import ServiceActor, ServicePlan
from residuum.rpc.credentials import CredentialsError, TokenSource
from residuum.serving import flags_of
from residuum.transport.progress import progress_bar
from residuum.wire.tokens import make_token

if TYPE_CHECKING:
    from residuum.transport.connection_settings import Token

NODE_SECONDS = 60.0
RESTARTS = 3
_POLL_SECONDS = 0.5
_STOP_SECONDS = 90.0
_ADDRESS_SECONDS = 10.0
_CALLS_AT_ONCE = 64
"""Calls of one actor that run at once. All of them wait or answer at once."""


@dataclass(frozen=True)
class RayServices:
    """Inference services that run as actors. `extract` takes them in place of endpoints."""

    actors: Sequence[Any] = field(repr=False)
    """The actors' handles."""
    first_endpoints: tuple[str, ...]
    """Where the services were when they had started, in the order of `actors`."""
    settings: Mapping[str, Any] = field(repr=False)  # it has the token
    """The arguments that a client of them needs."""

    @property
    def endpoints(self) -> list[str]:
        """The addresses of those that serve now. A service that was restarted has another one."""
        return [address for address in map(_address_now, self.actors) if address]

    def client(self, number: int = 0, **arguments: Any) -> Client:
        """Return a client of one of the services.

        Args:
            number: The service, in the order of `actors`.
            arguments: Further arguments of `Client`.

        Raises:
            Unavailable: The service does not serve at the moment.
        """
        address = _address_now(self.actors[number])
        if not address:
            raise Unavailable(
                f"Service {number} of {len(self.actors)} does not serve at the moment. Ray may be restarting it: try "
                "again later, or use another one."
            )
        return Client(address, **{**self.settings, **arguments})


def _address_now(actor: Any) -> str:
    """Return where the service of an actor serves; "" if it does not."""
    with contextlib.suppress(RayActorError, GetTimeoutError):
        return str(ray.get(actor.address.remote(), timeout=_ADDRESS_SECONDS))
    return ""


def serve(
    model: str | os.PathLike[str],
    *,
    services: int = 1,
    num_gpus: float = 1,
    num_cpus: float = 0,
    store: str | Iterable[str] | None = None,
    token: Token = None,
    python: str | None = None,
    node_timeout: float = NODE_SECONDS,
    max_restarts: int = RESTARTS,
    progress: bool = True,
    **settings: object,
) -> AbstractContextManager[RayServices]:
    """Start inference services as actors of a Ray cluster, and stop them at the end of the block.

    This is `residuum.serve` on a cluster. Each service runs on the node on which Ray places its actor, next to a store
    of its own for the rows that nobody has read yet, in the node's folder of temporary files (TMPDIR). If a service or
    its actor ends, Ray restarts the actor, on another node if its own is lost; meanwhile, `extract` uses the others.
    All end with the block, and also if this program dies.

    The nodes need residuum-server, in Ray's Python or in `python`. The services listen on their nodes' addresses, in
    plain text as Ray itself, and answer only to a token that this program chooses.

    Args:
        model: The model's folder, which all nodes have, or its name on the Hugging Face hub.
        services: How many to start: copies of the model.
        num_gpus: The GPUs of each, for example as many as its `tensor_parallel_size`; 0 to serve on CPUs.
        num_cpus: The CPUs that each reserves. `extract` needs some, too.
        store: Stores that run already, host:port, in plain text; None starts one for each service.
        token: The token of these stores, or its file here. It needs the rights read and write.
        python: The Python that has residuum-server on the nodes, if it is not Ray's.
        node_timeout: Seconds to wait until the cluster has a place for all services. Give more if it adds nodes.
        max_restarts: How often each may be restarted; -1 for no limit.
        progress: Show on stderr how many have started.
        settings: Further settings of the inference service, such as `max_model_len=4096`.

    Returns:
        A context manager. It yields the services once all serve.

    Raises:
        InvalidRequest: An argument is invalid, or the cluster has no place for all services.
        ResiduumError: A service did not start; the message says on which node, and why.

    Example:
        >>> with residuum.ray.serve("Qwen/Qwen2.5-3B", services=4) as services:
        ...     residuum.ray.extract(prompts, services, capture=capture).write_parquet("s3://bucket/rows")
    """
    plan = make_plan(model, flags_of(settings), store=store, token=token, python=python)
    need = Need(services, num_gpus, num_cpus)
    return running(plan, need, node_timeout=node_timeout, max_restarts=max_restarts, progress=progress)


def make_plan(
    model: str | os.PathLike[str],
    flags: Iterable[str],
    *,
    store: str | Iterable[str] | None,
    token: Token,
    python: str | None,
) -> ServicePlan:
    """Return what each actor runs; see `serve`. The flags are those of the inference service.

    Raises:
        BadCredentials: The token, or its file, cannot be used.
    """
    try:
        source = TokenSource(token) if isinstance(token, str) else TokenSource(path=token)
    except CredentialsError as error:
        raise BadCredentials(str(error)) from None
    stores = "" if store is None else ",".join(check_texts("store", store))
    return ServicePlan(
        model=_place_of(model), store=stores, token=source.get() or make_token(), python=python,
        flags=tuple(flags),
    )  # fmt: skip


@contextlib.contextmanager
def running(
    plan: ServicePlan, need: Need, *, node_timeout: float = NODE_SECONDS, max_restarts: int = RESTARTS, progress: bool
) -> Iterator[RayServices]:
    """Run services for as long as the context lasts; see `serve`."""
    need.check()
    actor = ray.remote(ServiceActor).options(
        num_cpus=need.num_cpus, num_gpus=need.num_gpus, max_restarts=max_restarts, max_concurrency=_CALLS_AT_ONCE,
        scheduling_strategy="SPREAD",
    )  # fmt: skip
    actors = [actor.remote(plan) for _ in range(need.services)]
    try:
        _wait_for_places(actors, need, node_timeout)
        endpoints = _wait_until_serving(actors, progress=progress)
        try:
            yield RayServices(actors, endpoints, {"token": plan.token, "tls": False, "insecure": True})
        finally:
            _stop(actors)
    finally:
        for handle in actors:
            ray.kill(handle)


@dataclass(frozen=True)
class Need:
    """What services need of the cluster."""

    services: int
    num_gpus: float
    num_cpus: float

    def check(self) -> None:
        """Check the numbers.

        Raises:
            InvalidRequest: There is no service, or a number is negative.
        """
        if self.services < 1:
            raise InvalidRequest(f"services={self.services} starts no service. Start at least one.")
        for name in ("num_gpus", "num_cpus"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name}={getattr(self, name)} is negative. Give 0 or more.")

    def check_nodes(self) -> None:
        """Check that a node of the cluster is large enough for one service.

        Raises:
            InvalidRequest: No node is.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("GPU", 0) >= self.num_gpus and node.get("CPU", 0) >= self.num_cpus for node in nodes):
            raise self.no_place("No node has a place for a service.")

    def no_place(self, what: str) -> InvalidRequest:
        """Return the failure that the cluster has no place for all services."""
        has, free = ray.cluster_resources(), ray.available_resources()
        advice = "Start fewer services (services=), or more nodes"
        if self.num_gpus:
            advice += "; to serve on CPUs, use num_gpus=0"
        return InvalidRequest(
            f"{what} Each needs {self.num_gpus:g} GPUs and {self.num_cpus:g} CPUs. The cluster has "
            f"{has.get('GPU', 0):g} GPUs and {has.get('CPU', 0):g} CPUs, of which {free.get('GPU', 0):g} GPUs and "
            f"{free.get('CPU', 0):g} CPUs are free. {advice}.",
            reason="INVALID_FIELD",
        )


def _place_of(model: str | os.PathLike[str]) -> str:
    """Return a name as it is, and the absolute path of a folder: actors run in other folders."""
    path = Path(model).expanduser()
    is_path = not isinstance(model, str) or path.exists() or model.startswith((".", "~"))
    return str(path.absolute()) if is_path else str(model)


def _wait_for_places(actors: Sequence[Any], need: Need, seconds: float) -> None:
    places = [actor.node.remote() for actor in actors]
    until = time.monotonic() + seconds
    waiting = places
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
        if waiting and time.monotonic() > until:
            raise need.no_place(f"{len(waiting)} of {len(actors)} services had no place within {seconds:g} s.")


def _wait_until_serving(actors: Sequence[Any], *, progress: bool) -> tuple[str, ...]:
    """Wait until all services serve, and return their addresses. There is no timeout, because models may be large."""
    starts = [actor.started.remote() for actor in actors]
    waiting = starts
    with progress_bar(f"starting {len(actors)} services", len(actors), enabled=progress) as advance:
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_SECONDS)
            for start in done:
                _address(start)
                advance(1)
    return tuple(_address(start) for start in starts)


def _address(start: Any) -> str:
    try:
        address, failure, node = ray.get(start)
    except ActorDiedError as error:
        raise ResiduumError(
            f"The actor of a service has ended. All nodes need the package residuum. Ray says: {error}"
        ) from None
    if failure:
        raise ResiduumError(f"A service did not start on the node {node}: {failure}")
    return str(address)


def _stop(actors: Sequence[Any]) -> None:
    """Stop the services, and wait until they have ended."""
    stops = [actor.stop.remote() for actor in actors]
    ray.wait(stops, num_returns=len(stops), timeout=_STOP_SECONDS)
