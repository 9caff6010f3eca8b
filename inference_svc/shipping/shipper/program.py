"""The shipper's command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from inference_svc.logs import LEVEL_VARIABLE
from inference_svc.shipping import credentials
from inference_svc.shipping.shipper.process import Shipper, ShipperSettings
from residuum.wire.placement import parse_stores
from svc_common.logs import configure_logs
from svc_common.memory import keep_memory
from svc_common.priority import give_way

_NICENESS = 5
"""Niceness by default: the engine must not wait for a core that a shipper uses."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a shipper until it stops, and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        stores = parse_stores(options.store)
    except ValueError as error:
        parser.error(f"--store: {error}")
    configure_logs(options.log_level)
    give_way(options.nice)
    keep_memory()
    settings = ShipperSettings(
        control_paths=tuple(options.control),
        stores=stores,
        max_unacked_bytes=options.max_unacked_bytes,
        ack_timeout_seconds=options.ack_timeout,
        grace_seconds=options.grace,
        parent_pid=options.parent_pid,
        figures_path=options.figures,
        credentials=credentials.from_options(options),
    )
    return Shipper(settings).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference_svc.shipping",
        description="Send captured rows from the rings of vLLM's workers to stores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--control",
        metavar="PATH",
        type=Path,
        action="append",
        required=True,
        help="control socket of a worker; repeat the flag for several. The socket need not exist yet",
    )
    parser.add_argument(
        "--store",
        metavar="[NAME=]HOST:PORT",
        action="append",
        required=True,
        help="a store; repeat the flag for several. The hash of a capture's ID decides which store it goes to",
    )
    parser.add_argument(
        "--max-unacked-bytes",
        metavar="N",
        type=int,
        default=ShipperSettings.max_unacked_bytes,
        help="most payload bytes that each store may leave unacknowledged",
    )
    parser.add_argument(
        "--ack-timeout",
        metavar="SECONDS",
        type=float,
        default=ShipperSettings.ack_timeout_seconds,
        help="open a new connection when a due acknowledgement is missing for this long",
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        default=ShipperSettings.grace_seconds,
        help="go on delivering for at most this long after SIGTERM",
    )
    parser.add_argument(
        "--nice",
        metavar="N",
        type=int,
        choices=range(20),
        default=_NICENESS,
        help="niceness, 0 to 19: with a higher value, other processes get a shared core first",
    )
    credentials.add_arguments(parser)
    parser.add_argument("--parent-pid", metavar="PID", type=int, help="stop when this is no longer the parent process")
    parser.add_argument("--figures", metavar="FILE", type=Path, help="keep figures of this shipper in a JSON file")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=os.environ.get(LEVEL_VARIABLE, "info"),
        help="lowest level that is logged",
    )
    return parser
