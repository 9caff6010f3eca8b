"""The dashboard, alerts and scrapes in deploy/observability name metrics and ports that the services have."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from inference_svc.metrics import InferenceMetrics, ServiceCollector
from inference_svc.requests.registry import RequestRegistry
from inference_svc.resources.vector_activator import VectorActivator
from inference_svc.resources.vector_cache import VectorCache
from inference_svc.shipping.metrics import ShippingCollector
from inference_svc.shipping.ring import EXTENT_ALIGNMENT
from inference_svc.shipping.supervisor import ShipperSupervisor
from inference_svc.shipping.worker.allotment import SharedAllotment
from residuum.rpc.credentials import Credentials
from residuum.wire.ids import make_id
from store_svc.server import Store
from store_svc.settings import StoreSettings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "observability"
COMPOSE = yaml.safe_load((FOLDER.parents[1] / "compose.yaml").read_text())
DASHBOARD = json.loads((FOLDER / "dashboards" / "residuum.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())

# Metrics that prometheus_client and Prometheus add to every scrape.
OF_PROCESSES = re.compile("process_|python_")
OF_PROMETHEUS = {"up"}
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}


def names_in(registry) -> Iterator[str]:
    for family in registry.collect():
        for suffix in SUFFIXES[family.type]:
            yield family.name + suffix


def store_names(folder) -> set[str]:
    """The metrics of a running store with all features on."""
    settings = StoreSettings(
        path=folder / "data", listen="127.0.0.1:0", max_bytes=32 << 20, retain_bytes=1 << 20,
        archive=f"file://{folder}/archive",
    )  # fmt: skip
    store = Store(settings)
    try:
        return set(names_in(store._metrics.registry))
    finally:
        store.stop()


def inference_names(folder) -> set[str]:
    """The metrics of the inference service's parts, before a model is loaded."""
    registry = RequestRegistry(600, 10, max_bytes=1 << 20, make_id=make_id)
    cache = VectorCache(8, 1 << 20, (16,), registry.is_leased)

    async def load(rows):
        raise AssertionError("nothing is loaded here")

    metrics = InferenceMetrics()
    metrics.registry.register(ServiceCollector(registry, cache, VectorActivator(cache, range(8), load, 1.0), None))
    shippers = ShipperSupervisor([], ["127.0.0.1:1"], 1, credentials=Credentials(), folder=str(folder))
    metrics.registry.register(ShippingCollector([], shippers))
    return set(names_in(metrics.registry))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return store_names(tmp_path_factory.mktemp("store")) | inference_names(tmp_path_factory.mktemp("inference"))


def selected(expression) -> Iterator[str]:
    """Return all metrics that a query names."""
    node = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    todo = [node]
    while todo:
        node = todo.pop()
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name, expression
            yield node.name
        elif isinstance(node, promql_parser.MatrixSelector):
            todo.append(node.vector_selector)
        elif isinstance(node, promql_parser.BinaryExpr):
            todo += [node.lhs, node.rhs]
        elif isinstance(node, promql_parser.Call):
            todo += node.args
        elif isinstance(node, (promql_parser.AggregateExpr, promql_parser.ParenExpr, promql_parser.UnaryExpr)):
            todo.append(node.expr)
        else:
            assert isinstance(node, promql_parser.NumberLiteral), node


PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(
    ("where", "expression"), [*QUERIES, *((rule["alert"], rule["expr"]) for rule in RULES)], ids=lambda text: text[:40]
)
def test_each_query_uses_only_exported_metrics(exported, where, expression):
    names = set(selected(expression))
    assert names
    assert {name for name in names if not OF_PROCESSES.match(name)} - exported - OF_PROMETHEUS == set()


def test_alerts_fire_when_they_should():
    """Prometheus' own tool tests the alerts. It is in Prometheus' image and packages."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no `promtool` here")
    checked = subprocess.run(
        [promtool, "test", "rules", Path(__file__).with_name("alerts.yml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_an_alert_fires_for_a_service_that_is_no_longer_a_target():
    """The name of an ended container no longer resolves, so its `up` is absent instead of 0."""
    (rule,) = (rule for rule in RULES if rule["alert"] == "ResiduumServiceDown")
    was_and_is_not = 'last_over_time(up{job="residuum"}[1h]) unless up{job="residuum"}'
    wanted = promql_parser.parse(f'up{{job="residuum"}} == 0 or ({was_and_is_not})')
    assert str(promql_parser.parse(rule["expr"])) == str(wanted)


def test_the_alert_about_a_waiting_model_needs_no_full_ring():
    """With two stores, the rows for one that is away fill three quarters of the ring."""
    ring = SharedAllotment(16 * EXTENT_ALIGNMENT, ["away", "other"])
    while ring.take(EXTENT_ALIGNMENT, "away"):
        pass
    assert ring.bytes_used == 12 * EXTENT_ALIGNMENT
    (rule,) = (rule for rule in RULES if rule["alert"] == "ResiduumModelWaitsForStore")
    assert set(selected(rule["expr"])) == {"residuum_inference_ring_wait_seconds_total"}


def test_every_exported_metric_is_used(exported):
    """Each metric is in the dashboard or an alert."""
    shown = {name for _, expression in QUERIES for name in selected(expression)}
    ours = {re.sub("_(bucket|count|sum)$", "", name) for name in exported if name.startswith("residuum_")}
    assert ours - {re.sub("_(bucket|count|sum)$", "", name) for name in shown} == set()


def test_panels_do_not_overlap():
    places = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & places, panel["title"]
        places |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_use_the_provisioned_data_source():
    (source,) = yaml.safe_load((FOLDER / "datasource.yml").read_text())["datasources"]
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", source["type"])
    assert variable["current"]["value"] == source["uid"]
    for panel in PANELS:
        for asked in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert asked == {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in COMPOSE["services"]


def test_the_dashboard_is_in_the_provisioned_folder():
    (provider,) = yaml.safe_load((FOLDER / "dashboards.yml").read_text())["providers"]
    folder = provider["options"]["path"]
    grafana = COMPOSE["services"]["grafana"]
    assert f"./deploy/observability/dashboards:{folder}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/residuum.json"


def test_every_service_with_metrics_is_scraped():
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    showing = {
        name: service["environment"]["RESIDUUM_METRICS"]
        for name, service in COMPOSE["services"].items()
        if "RESIDUUM_METRICS" in service.get("environment", {})
    }
    assert set(found["names"]) == set(showing)
    assert {address.rpartition(":")[2] for address in showing.values()} == {str(found["port"])}
    # Queries that concern only this project's processes select them by this name.
    assert job["job_name"] == "residuum"
    assert configuration["rule_files"] == ["alerts.yml"]
