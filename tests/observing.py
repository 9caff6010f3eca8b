"""What running services say of themselves: their log lines and their metrics."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from svc_common.launcher import Service


def log_lines(service: Service) -> list[dict[str, object]]:
    """Return the lines of a service's log."""
    return [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]


def metrics_text(service: Service) -> str:
    """Return the metrics of a service that was started with `--metrics`, in the text format of Prometheus."""
    (port,) = (line["port"] for line in log_lines(service) if line["event"] == "metrics")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as answer:
        text: str = answer.read().decode()
    return text


def metrics(service: Service) -> dict[tuple[str, ...], float]:
    """Return the metrics of a service by their name and the values of their labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics_text(service))
        for sample in family.samples
    }
