"""`residuum doctor`: checks each step of the connections to and between the services, with advice for failures.

A problem that does not prevent anything yet is a warning. Warnings do not make the command fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import socket
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import grpc

import residuum
from residuum.cli.connection import open_client
from residuum.cli.output import Output, with_flags
from residuum.rpc.channels import open_channel
from residuum.rpc.credentials import Credentials, is_loopback
from residuum.transport.connection_settings import describe
from residuum.transport.progress import size
from residuum.v1 import inference_pb2, inference_pb2_grpc, store_pb2, store_pb2_grpc

_CONNECT_SECONDS = 5.0
_MAX_SKEW_SECONDS = 2.0
"""The largest accepted difference of clocks. Ages and times in manifests follow the services' clocks."""
_FILLING, _FULL = 0.85, 0.98
"""The used fractions of a store's space above which `doctor` warns, and above which the store counts as full."""
_LITTLE_DISK = 1 << 30
_NO_DISK = 8 << 20
"""With less room on its disk, a store cannot store a chunk: it keeps 4 MiB for ending and deleting captures."""
TESTED_VLLM = ("0.24.0", "0.32.0", "0.33.0")
"""The versions of vLLM whose captured rows were compared with those of transformers on GPUs; see docs/models.md."""

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]")  # noqa: S104 - names to warn about


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """The name of the check."""
    ok: bool
    """Whether the check passed."""
    detail: str
    """What the check found, and what to do if it did not pass."""
    warning: bool = False
    """Whether a passed check needs attention."""


def run(options: argparse.Namespace, output: Output) -> int:
    """Run the checks. Return 1 if one failed, else 0."""
    failed = False
    with open_client(options) as client:
        for finding in examine(client, named_store=options.store is not None):
            failed = failed or not finding.ok
            _show(finding, output)
    return 1 if failed else 0


def _show(finding: Finding, output: Output) -> None:
    finding = dataclasses.replace(finding, detail=with_flags(finding.detail))
    if output.as_json:
        output.json(vars(finding))
    else:
        mark = ("warn" if finding.warning else "ok  ") if finding.ok else "FAIL"
        output.say(f"{mark}  {finding.check}: {finding.detail}")


def examine(client: residuum.Client, *, named_store: bool) -> Iterator[Finding]:
    """Yield findings. Checks that depend on a failed one are skipped."""
    reachable = yield from _endpoint("inference service", client.endpoint)
    if not reachable:
        if named_store:
            yield from _examine_stores(client)
        return
    yield from _credentials(client)
    health = _health("inference service", client.health().inference)
    info = None
    started = time.time()
    try:
        info = client.info(check_store=True)
    except residuum.InvalidRequest as error:  # a store answers there: its health is not that of an inference service
        yield Finding("inference service", ok=False, detail=str(error))
    except residuum.ResiduumError as error:
        yield health
        yield Finding("model", ok=False, detail=str(error))
    else:
        yield health
        yield from _examine_info(info, started)
    if info is not None or named_store:  # otherwise the store's address is unknown
        stores = yield from _examine_stores(client)
        yield from _tokens(client, stores)


def _examine_info(info: residuum.ModelInfo, started: float) -> Iterator[Finding]:
    yield Finding("model", ok=True, detail=_model(info))
    yield _versions("versions", info.server_version, f", vLLM {info.vllm_version}{_tested(info.vllm_version)}")
    yield from _clock("inference service", info.server_time, started)
    if info.load is not None:
        yield _load(info.load, info.limits["ring_bytes"])
    if info.store_reachable is not None:
        advice = "" if info.store_reachable else " Check that the inference service's machine can reach that address."
        yield Finding("inference service: store", ok=info.store_reachable, detail=info.store_detail + advice)


def _examine_stores(client: residuum.Client) -> Generator[Finding, None, list[str]]:
    """Check the stores. The generator returns the endpoints of those that accept connections."""
    try:
        endpoints = client.store_endpoints()
    except residuum.ResiduumError as error:
        yield Finding("store", ok=False, detail=str(error))
        return []
    reachable: list[str] = []
    for endpoint in endpoints:
        name = "store" if len(endpoints) == 1 else f"store {endpoint}"
        if (yield from _endpoint(name, endpoint, _hint(endpoint, client.endpoint))):
            reachable.append(endpoint)
    if not reachable:
        return []
    health = client.health()
    for endpoint in reachable:
        yield _health(f"store {endpoint}", health.stores[endpoint])
    problems = client.shared_memory_problems()
    for endpoint in reachable:
        why_not = problems.get(endpoint, "")
        detail = f"rows pass through the connection: {why_not}" if why_not else "rows pass through it"
        yield Finding(f"store {endpoint}: shared memory", ok=True, detail=detail)
    started = time.time()
    answers, failure = _ask(client)
    if failure and len(answers) < len(reachable):  # unreachable stores have their own findings
        yield Finding("store answers", ok=False, detail=failure)
    if answers:
        yield Finding("store answers", ok=True, detail="; ".join(map(_contents, answers)))
    for stats in answers:
        yield from _examine_stats(stats, started)
        yield from _rights(client.credentials, stats)
    return reachable


def _ask(client: residuum.Client) -> tuple[list[residuum.StoreStats], str]:
    """Return the statistics of stores that answer, and the reasons why others do not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", residuum.SilentStoreWarning)
        try:
            answers = client.stats(allow_partial=True)
        except residuum.ResiduumError as error:
            return [], str(error)
    return answers, "; ".join(str(item.message) for item in caught)


def _examine_stats(stats: residuum.StoreStats, started: float) -> Iterator[Finding]:
    name = f"store {stats.endpoint}"
    yield _versions(f"{name}: versions", stats.server_version)
    yield from _clock(name, stats.server_time, started)
    if stats.why_full:
        detail = (
            f"it refuses rows and new captures, because {stats.why_full}. Delete captures (residuum rm), or give it "
            "more space. Then it accepts rows again without a restart"
        )
        yield Finding(f"{name}: full", ok=False, detail=detail)
    if stats.archive_url:
        yield _archive(name, stats)
    if stats.append_limit_bytes:  # older stores do not report space
        yield _room(name, stats)
        yield _disk(name, stats)


def _load(load: residuum.ServiceLoad, ring_bytes: int) -> Finding:
    """Return what the inference service does, and whether it has lost rows."""
    requests = "1 request runs" if load.running_requests == 1 else f"{load.running_requests} requests run"
    detail = f"{requests}; {size(load.ring_used_bytes)} of {size(ring_bytes)} of the rings are filled"
    if load.ring_losses:
        detail += (
            f"; rows were lost {load.ring_losses} times since it started, so these captures are incomplete. Their "
            "manifests say why (residuum ls --state incomplete)"
        )
    return Finding("inference service: load", ok=True, warning=load.ring_losses > 0, detail=detail)


def _archive(name: str, stats: residuum.StoreStats) -> Finding:
    """Return whether captures reach the archive."""
    if stats.archive_behind:
        detail = (
            f"{stats.archive_url} cannot be written ({stats.archive_behind}), so {stats.archive_pending} captures wait "
            "to be copied. The store goes on, and copies them when it can"
        )
        return Finding(f"{name}: archive", ok=False, detail=detail)
    if stats.archive_not_copied:
        detail = (
            f"{stats.archive_not_copied} captures are not copied to {stats.archive_url}, because chunks of them are "
            "damaged. The store's log names them. Delete them, or repair its disk"
        )
        return Finding(f"{name}: archive", ok=False, detail=detail)
    there = stats.archive_copied + stats.archive_moved
    return Finding(f"{name}: archive", ok=True, detail=f"{there} captures in {stats.archive_url}")


def _rights(credentials: Credentials, stats: residuum.StoreStats) -> Iterator[Finding]:
    """Warn about a store that gives all rights to every caller: it shows callers without a token all tenants."""
    if credentials.has_token or stats.tenant is not None:
        return
    shows_certificate = credentials.tls is not None and credentials.tls.cert is not None
    if not shows_certificate and is_loopback(stats.endpoint.rpartition(":")[0]):
        return
    who = "everyone with a certificate that it accepts" if shows_certificate else "everyone who can reach it"
    detail = (
        f"{who} has all rights there, for all tenants' captures, because it requires no token. To give callers "
        "different rights, start it and the inference service with --tokens"
    )
    yield Finding(f"store {stats.endpoint}: rights", ok=True, warning=True, detail=detail)


def _tokens(client: residuum.Client, stores: list[str]) -> Iterator[Finding]:
    """Warn if only one of the services was started with --tokens."""
    service = _requires_token(client.endpoint, _get_model_info, client.credentials)
    for store in stores:
        answer = _requires_token(store, _get_stats, client.credentials)
        if service is None or answer is None or service == answer:
            continue
        if service:
            detail = (
                "the inference service requires a token, but this store does not. So everyone who can reach it has all "
                "rights there, and tenants do not find their captures. Start it with the inference service's --tokens; "
                "the inference service then needs a --store-token-file"
            )
        else:
            detail = (
                "this store requires a token, but the inference service does not. So everyone who can reach that may "
                "generate, and all captures belong to the tenant of its --store-token-file: other tenants do not find "
                "them. Start the inference service with this store's --tokens"
            )
        yield Finding(f"store {store}: tokens", ok=True, warning=True, detail=detail)


def _requires_token(endpoint: str, ask: Callable[[grpc.Channel], object], credentials: Credentials) -> bool | None:
    """Return whether a service refuses a call without a token; None if it does not answer it."""
    with open_channel(endpoint, credentials=Credentials(tls=credentials.tls)) as channel:
        try:
            ask(channel)
        except grpc.RpcError as error:
            return True if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return False


def _get_model_info(channel: grpc.Channel) -> object:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=_CONNECT_SECONDS)


def _get_stats(channel: grpc.Channel) -> object:
    return store_pb2_grpc.StoreServiceStub(channel).GetStats(store_pb2.GetStatsRequest(), timeout=_CONNECT_SECONDS)


def _clock(name: str, theirs: datetime.datetime | None, started: float) -> Iterator[Finding]:
    """Compare a server's clock, read between `started` and now, with ours."""
    if theirs is None:
        return
    now, at = time.time(), theirs.timestamp()
    skew = max(started - at, 0.0) - max(at - now, 0.0)
    if abs(skew) <= _MAX_SKEW_SECONDS:
        yield Finding(f"{name}: clock", ok=True, detail="agrees with this machine's clock")
        return
    detail = (
        f"is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} this machine's clock; times in manifests, and "
        "the ages at which captures expire, follow the services' clocks. Run a time service on both machines"
    )
    yield Finding(f"{name}: clock", ok=True, warning=True, detail=detail)


def _room(name: str, stats: residuum.StoreStats) -> Finding:
    fill = stats.used_bytes / stats.append_limit_bytes
    detail = f"{size(stats.used_bytes)} of {size(stats.append_limit_bytes)} in use ({fill:.0%}); {_kept(stats)}"
    if fill >= _FILLING:
        detail += (
            f". When it is full, captures end INCOMPLETE or requests wait. Delete captures (residuum rm), start the "
            f"store with --retain-hours or --retain-bytes, or with more than --max-bytes {stats.max_bytes}"
        )
    return Finding(f"{name}: room", ok=fill < _FULL, warning=_FILLING <= fill < _FULL, detail=detail)


def _kept(stats: residuum.StoreStats) -> str:
    """Return which captures the store keeps, in words."""
    limits = []
    if stats.retain_seconds is not None:
        limits.append(f"for {stats.retain_seconds / 3600:g} h")
    if stats.retain_bytes is not None:
        limits.append(f"up to {size(stats.retain_bytes)} in all")
    return f"it keeps captures {' and '.join(limits) or 'until they are deleted'}"


def _disk(name: str, stats: residuum.StoreStats) -> Finding:
    growth = max(stats.max_bytes - stats.disk_bytes, 0)
    short = stats.free_disk_bytes < min(growth, _LITTLE_DISK)
    reusable = max(stats.disk_bytes - stats.used_bytes, 0)
    is_full = growth > 0 and stats.free_disk_bytes + reusable < _NO_DISK
    detail = f"{size(stats.free_disk_bytes)} free"
    if is_full:
        detail += ", which is too little to store rows: the disk is full. Free some space, or delete captures"
    elif short:
        detail += f", but the store may still grow by {size(growth)}: the disk will be full first. Free some space"
    return Finding(f"{name}: disk", ok=not is_full, warning=short and not is_full, detail=detail)


def _endpoint(name: str, endpoint: str, hint: str = "") -> Generator[Finding, None, bool]:
    """Resolve the host's name and connect. The generator returns whether both succeeded."""
    host, _, port = endpoint.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        yield Finding(f"{name}: address", ok=False, detail=f"{host} has no address ({error}). Check the name.{hint}")
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        detail = (
            f"{endpoint} ({addresses[0][4][0]}) accepts no connection: {error}. Check that the service is running, "
            f"that it listens on an address reachable from here, and that no firewall blocks it.{hint}"
        )
        yield Finding(f"{name}: connection", ok=False, detail=detail)
        return False
    yield Finding(f"{name}: connection", ok=True, detail=f"{endpoint} ({addresses[0][4][0]}) accepts connections")
    return True


def _hint(store: str, inference: str) -> str:
    """Return advice if the store's address is a loopback address of the inference service's machine."""
    near, far = store.rpartition(":")[0], inference.rpartition(":")[0]
    if near in _LOOPBACK and far not in _LOOPBACK:
        return (
            f" The inference service at {inference} says that its store is at {store}, which here means this machine. "
            "Start it with a store address that clients can reach, or name the store with --store."
        )
    return ""


def _credentials(client: residuum.Client) -> Iterator[Finding]:
    """Report the client's credentials, and warn about traffic that others may read."""
    credentials, host = client.credentials, client.endpoint.rpartition(":")[0]
    exposed = credentials.tls is None and not is_loopback(host)
    detail = f"{describe(credentials)}"
    if exposed:
        secret = "the token and all traffic" if credentials.has_token else "all traffic"
        detail += f": anyone on the network path to {client.endpoint} can read {secret}; --tls-ca encrypts it"
    yield Finding("credentials", ok=True, warning=exposed, detail=detail)


def _health(name: str, status: str) -> Finding:
    advice = {
        "SERVING": "it is serving",
        "NOT_SERVING": "it is loading or stopping; wait, and read its log if that takes long",
        "UNREACHABLE": "something listens, but does not speak gRPC or does not answer; check the port",
    }
    return Finding(f"{name}: health", ok=status == "SERVING", detail=advice.get(status, status))


def _versions(check: str, theirs: str, more: str = "") -> Finding:
    ours = residuum.__version__
    fits = _series(ours) == _series(theirs) or "source" in ours or theirs in {"", "unknown"}  # run from a checkout
    advice = "" if fits else "; the first two numbers should match: upgrade the older one"
    return Finding(check, ok=fits, detail=f"client {ours}, server {theirs}{more}{advice}")


def _tested(vllm_version: str) -> str:
    """Return whether captures with a version of vLLM were tested, as the end of a sentence."""
    if vllm_version.partition("+")[0] in TESTED_VLLM:
        return ""
    return f" (not tested, as {', '.join(TESTED_VLLM[:-1])} and {TESTED_VLLM[-1]} were)"


def _series(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _model(info: residuum.ModelInfo) -> str:
    return f"{info.model}: {info.num_layers} layers, hidden size {info.hidden_size}, {info.dtype}"


def _contents(stats: residuum.StoreStats) -> str:
    name = stats.endpoint if stats.store in {"", stats.endpoint} else f"{stats.store} ({stats.endpoint})"
    count = sum(stats.captures.values())
    return f"{name} holds {count:,} capture{'' if count == 1 else 's'} in {size(stats.num_bytes)}"
