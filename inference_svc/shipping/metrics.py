"""The metrics of workers and shippers for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from inference_svc.shipping.figures import figures_by_store, figures_path, read_figures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import Metric

    from inference_svc.shipping.figures import Figures
    from inference_svc.shipping.supervisor import ShipperSupervisor

_Table = tuple[tuple[str, str, str, bool], ...]
"""For each figure of a process: its key, its metric name, its help text, and whether it is a counter."""

_RINGS: _Table = (
    ("ring_bytes", "ring_bytes", "Bytes of the ring between a worker and the shippers.", False),
    ("bytes_used", "ring_used_bytes", "Bytes of the ring that are filled, or being filled.", False),
    ("under_way", "ring_extents", "Extents that a shipper has, or that wait for a shipper.", False),
    ("connected_shippers", "ring_shippers", "Connected shippers that take extents.", False),
    ("published", "ring_extents_published", "Extents handed to shippers.", True),
    ("losses", "ring_losses", "Reported losses: rows that a full ring shed, or that failed.", True),
    ("waits", "ring_waits", "Times that a worker waited for room in the ring.", True),
    ("seconds_waited", "ring_wait_seconds", "Seconds that a worker waited for room, in total.", True),
)

_RING_SHARES: _Table = (
    ("store_bytes_used", "ring_store_used_bytes", "Bytes of the ring that hold rows for the store.", False),
)

_SHIPPERS: _Table = (
    ("unacked_bytes", "shipper_unacked_bytes", "Bytes sent to the store and not acknowledged yet.", False),
    ("ack_lag_seconds", "shipper_ack_lag_seconds", "Seconds that the store has owed an acknowledgement.", False),
    ("acked_bytes", "shipper_acked_bytes", "Bytes that the store has acknowledged.", True),
    ("settled", "shipper_messages", "Messages that the store has acknowledged or rejected.", True),
    ("rejected", "shipper_rejected_messages", "Messages that the store has rejected.", True),
    ("streams", "shipper_streams", "Streams opened to the store.", True),
)


class ShippingCollector(Collector):
    """Metrics of workers and shippers, read at each scrape from the files that they keep; see `figures`."""

    def __init__(self, control_paths: Sequence[str], shippers: ShipperSupervisor) -> None:
        """Read from the workers of these control sockets and from these shippers."""
        self._control_paths = tuple(control_paths)
        self._shippers = shippers

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. They are at most a second old, unless a process hangs."""
        workers = [read_figures(figures_path(path)) for path in self._control_paths]
        yield from _families(["worker"], [([str(index)], figures) for index, figures in enumerate(workers)], _RINGS)
        yield from _families(["worker", "store"], _by_store(workers), _RING_SHARES)
        statuses = self._shippers.status()
        yield from _families(["shipper", "store"], _by_store([status.figures for status in statuses]), _SHIPPERS)
        running = GaugeMetricFamily(
            "residuum_inference_shipper_up", "1: the shipper runs; 0: it is being restarted.", labels=["shipper"]
        )
        restarts = CounterMetricFamily(
            "residuum_inference_shipper_restarts", "Restarts of the shipper.", labels=["shipper"]
        )
        for index, status in enumerate(statuses):
            running.add_metric([str(index)], status.pid is not None)
            restarts.add_metric([str(index)], status.restarts)
        yield running
        yield restarts


def _families(
    labels: Sequence[str], samples: Sequence[tuple[Sequence[str], Figures]], table: _Table
) -> Iterator[Metric]:
    """Yield the metrics of a table. A sample is the values of the labels, and figures; it may lack some."""
    for key, name, text, grows in table:
        kind = CounterMetricFamily if grows else GaugeMetricFamily
        family = kind(f"residuum_inference_{name}", text, labels=labels)
        for values, figures in samples:
            if key in figures:
                family.add_metric(values, figures[key])
        yield family


def _by_store(processes: Sequence[Figures]) -> list[tuple[list[str], Figures]]:
    """Return the figures of each process for each store, labelled with both."""
    return [
        ([str(index), store], own)
        for index, figures in enumerate(processes)
        for store, own in figures_by_store(figures).items()
    ]
