"""`residuum health`: checks one service's health, for health checks of containers. `doctor` is for people."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import grpc

from residuum.cli.connection import credentials_of
from residuum.cli.output import Output
from residuum.protocol.deadlines import call_seconds
from residuum.protocol.endpoints import check_endpoint
from residuum.rpc.channels import open_channel
from residuum.rpc.credentials import Credentials
from residuum.transport import health
from residuum.transport.connection_settings import resolve_credentials
from residuum.transport.failures import from_rpc_error

if TYPE_CHECKING:
    from collections.abc import Callable


SECONDS = 5.0
"""The default timeout of the check."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the service."""
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="check this service: inference, store, or a full service name; fails if another service listens there "
        "(default: the server as a whole)",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the health of the service at the endpoint. Return 0 if it is serving, else 1."""
    status = _ask(options.endpoint, options.service, options.timeout, _credentials(options))
    if output.as_json:
        output.json({"endpoint": options.endpoint, "status": status})
    else:
        output.say(f"{options.endpoint}\t{status}")
    return 0 if status == "SERVING" else 1


def _credentials(options: argparse.Namespace) -> Credentials:
    """Return the credentials without a token, which health checks do not need."""
    return resolve_credentials(**{**credentials_of(options), "token": ""})


def _ask(endpoint: str, service: str, timeout: float, credentials: Credentials) -> str:
    # This does not use Client, which would also ask the inference service for its stores. Their health is not this
    # service's, and their advertised addresses may not work inside its container.
    check_endpoint(endpoint)
    with open_channel(endpoint, credentials=credentials) as channel:
        check: Callable[..., bytes] = channel.unary_unary(health.CHECK)
        try:
            return health.status_of_answer(check(health.request_for(service), timeout=call_seconds(timeout)))
        except grpc.RpcError as error:
            return health.status_of_failure(from_rpc_error(error, endpoint))
