"""`residuum doctor`: every step of the way to both services, in order, with what to do about the first that fails."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import residuum
from residuum.cli.commands import open_client
from residuum.cli.output import Output

_CONNECT_SECONDS = 5.0
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]")  # noqa: S104 - names to warn about


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    """What was looked at."""
    ok: bool
    """Whether it is as it should be."""
    detail: str
    """What was seen, and what to do if it is not."""


def run(options: argparse.Namespace, output: Output) -> int:
    """Run the checks; 1 if one of them failed."""
    failed = False
    with open_client(options) as client:
        for finding in _examine(client, named_store=options.store is not None):
            failed = failed or not finding.ok
            _show(finding, output)
    return 1 if failed else 0


def _show(finding: Finding, output: Output) -> None:
    if output.as_json:
        output.json(vars(finding))
    else:
        mark = "ok  " if finding.ok else "FAIL"
        output.say(f"{mark}  {finding.check}: {finding.detail}")


def _examine(client: residuum.Client, *, named_store: bool) -> Iterator[Finding]:
    """Yield findings; what builds on a failed check is left out."""
    reachable = yield from _endpoint("inference service", client.endpoint)
    if not reachable:
        return
    yield _health("inference service", client.health().inference)
    info = None
    try:
        info = client.info()
        yield Finding("model", ok=True, detail=_model(info))
        yield _versions(info)
    except residuum.ResiduumError as error:
        yield Finding("model", ok=False, detail=str(error))
    if info is not None or named_store:  # otherwise nobody could say where the store is: not its fault
        yield from _examine_stores(client)


def _examine_stores(client: residuum.Client) -> Iterator[Finding]:
    try:
        endpoints = client.store_endpoints()
    except residuum.ResiduumError as error:
        yield Finding("store", ok=False, detail=str(error))
        return
    for endpoint in endpoints:
        reachable = yield from _endpoint("store", endpoint, _hint(endpoint, client.endpoint))
        if not reachable:
            return
    health = client.health()
    for endpoint, status in health.stores.items():
        yield _health(f"store {endpoint}", status)
    yield _guard("store answers", lambda: _stats(client))


def _endpoint(name: str, endpoint: str, hint: str = "") -> Generator[Finding, None, bool]:
    """Look up the name and connect; the generator returns whether both worked."""
    host, _, port = endpoint.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        yield Finding(f"{name}: address", ok=False, detail=f"{host} has no address ({error}). Is the name right?{hint}")
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        detail = (
            f"{endpoint} ({addresses[0][4][0]}) takes no connection: {error}. Is the service running and listening on "
            f"an address that is reachable from here, and does no firewall stand between?{hint}"
        )
        yield Finding(f"{name}: connection", ok=False, detail=detail)
        return False
    yield Finding(f"{name}: connection", ok=True, detail=f"{endpoint} ({addresses[0][4][0]}) takes connections")
    return True


def _hint(store: str, inference: str) -> str:
    """Say what is probably wrong when the store's address is one of another machine's own."""
    near, far = store.rpartition(":")[0], inference.rpartition(":")[0]
    if near in _LOOPBACK and far not in _LOOPBACK:
        return (
            f" The inference service at {inference} says that its store is at {store}, which from here means this "
            "machine; start it with an address that clients can reach, or name the store with --store."
        )
    return ""


def _health(name: str, status: str) -> Finding:
    advice = {
        "SERVING": "it serves",
        "NOT_SERVING": "it is loading or stopping; wait, and look into its log if that takes long",
        "UNREACHABLE": "something listens, but does not speak gRPC or does not answer; is it the right port?",
    }
    return Finding(f"{name}: health", ok=status == "SERVING", detail=advice.get(status, status))


def _versions(info: residuum.ModelInfo) -> Finding:
    ours, theirs = residuum.__version__, info.server_version
    fits = _series(ours) == _series(theirs) or "source" in ours
    advice = "" if fits else "; they should agree up to the second number: upgrade the older one"
    return Finding("versions", ok=fits, detail=f"client {ours}, server {theirs}, vLLM {info.vllm_version}{advice}")


def _series(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _model(info: residuum.ModelInfo) -> str:
    return f"{info.model}: {info.num_layers} layers, hidden size {info.hidden_size}, {info.dtype}"


def _stats(client: residuum.Client) -> str:
    lines = [
        f"{stats.endpoint} holds {sum(stats.captures.values())} captures in {stats.num_bytes} bytes"
        for stats in client.stats()
    ]
    return "; ".join(lines)


def _guard(check: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check, ok=True, detail=look())
    except residuum.ResiduumError as error:
        return Finding(check, ok=False, detail=str(error))
