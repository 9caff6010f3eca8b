"""The commands `info` and `stats`: what is served, and what the stores hold."""

from __future__ import annotations

import argparse
import dataclasses

import residuum
from residuum.cli.connection import open_client, silent_stores
from residuum.cli.output import Output
from residuum.transport.progress import size


def info(options: argparse.Namespace, output: Output) -> int:
    """Show the served model and the limits."""
    with open_client(options) as client:
        facts = dataclasses.asdict(client.info())
    if facts["store_reachable"] is None:  # the inference service was not asked to check its stores
        del facts["store_reachable"], facts["store_detail"]
    if not output.as_json:
        del facts["attention"]  # a dozen numbers for each layer: for programs
        every = facts["num_layers"]
        facts["site_layers"] = {
            site: layers for site, layers in facts["site_layers"].items() if len(layers) < every
        } or "all layers have all sites"
    if output.is_terminal:
        facts["limits"] = {
            name: size(limit) if name.endswith("_bytes") else limit for name, limit in facts["limits"].items()
        }
    output.facts(facts)
    return 0


_WHOLE_STORE = {
    "num_chunks",
    "disk_bytes",
    "max_bytes",
    "used_bytes",
    "append_limit_bytes",
    "free_disk_bytes",
    "retain_seconds",
    "retain_bytes",
    "expired_by_age",
    "expired_by_size",
    "bytes_expired",
    "archive_pending",
    "archive_not_copied",
    "archive_copied",
    "archive_moved",
    "archive_behind",
}
"""Statistics that a store gives only to admins. For other callers they are unknown, not 0, so they are not shown."""


def stats(options: argparse.Namespace, output: Output) -> int:
    """Show each store's statistics, and their total if there are several stores."""
    with open_client(options) as client, silent_stores(output) as silent:
        found = client.stats(allow_partial=True)
    for item in [*found, residuum.StoreStats.total(found)] if len(found) > 1 else found:
        facts = dataclasses.asdict(item)
        if item.tenant is not None:
            facts = {name: facts[name] for name in facts if name not in _WHOLE_STORE}
        if not item.archive_url:
            facts = {name: facts[name] for name in facts if not name.startswith("archive_")}
        if output.is_terminal:
            for name in facts:
                if name.endswith("_bytes") and facts[name] is not None:
                    facts[name] = size(facts[name])
        output.facts(facts)
    return 1 if silent else 0
