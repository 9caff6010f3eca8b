"""`residuum health`: one question to one service, for a container's health check. `doctor` is for people."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import grpc

from residuum.cli.commands import credentials_of
from residuum.cli.output import Output
from residuum.protocol.endpoints import check_endpoint
from residuum.rpc.channels import open_channel
from residuum.rpc.credentials import Credentials
from residuum.transport import health
from residuum.transport.connection_settings import resolve_credentials
from residuum.transport.failures import from_rpc_error

if TYPE_CHECKING:
    from collections.abc import Callable


SECONDS = 5.0
"""How long an answer may take if the command line does not say."""


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the health of the service at the endpoint; 0 if it serves, else 1."""
    status = _ask(options.endpoint, options.service, options.timeout, _credentials(options))
    if output.as_json:
        output.json({"endpoint": options.endpoint, "status": status})
    else:
        output.say(f"{options.endpoint}\t{status}")
    return 0 if status == "SERVING" else 1


def _credentials(options: argparse.Namespace) -> Credentials:
    """Return how to connect. Health takes no token, so none is sent."""
    return resolve_credentials(**{**credentials_of(options), "token": ""})


def _ask(endpoint: str, service: str, timeout: float, credentials: Credentials) -> str:
    # Not through Client: it would ask the inference service for its stores, whose health is not this service's, and
    # whose advertised address need not work from inside its container.
    check_endpoint(endpoint)
    with open_channel(endpoint, credentials=credentials) as channel:
        check: Callable[..., bytes] = channel.unary_unary(health.CHECK)
        try:
            return health.status_of_answer(check(health.request_for(service), timeout=timeout))
        except grpc.RpcError as error:
            return health.status_of_failure(from_rpc_error(error, endpoint))
