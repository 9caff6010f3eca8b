"""`residuum.ray.serve`: services that cannot start, and those that do: they serve, move, and end."""

from __future__ import annotations

from pathlib import Path

import pytest

import residuum
import residuum.ray

ROOT = Path(__file__).parents[2]
PYTHON = str(ROOT / ".venv" / "bin" / "python")


@pytest.mark.parametrize("numbers", [{"services": 0}, {"num_gpus": -1}, {"num_cpus": -0.5}])
def test_numbers_that_start_nothing(cluster, numbers):
    (name,) = numbers
    with pytest.raises(residuum.InvalidRequest, match=name), residuum.ray.serve("model", **numbers):
        pass


def test_a_cluster_without_room_is_an_error_and_no_wait(cluster):
    with (
        pytest.raises(residuum.InvalidRequest, match=r"1 GPUs and 0 CPUs. The cluster has 0 GPUs.*num_gpus=0"),
        residuum.ray.serve("model", node_timeout=1),
    ):
        pass
    with (
        pytest.raises(residuum.InvalidRequest, match=r"of 3 services had no place within 20 s.*Start fewer services"),
        residuum.ray.serve("model", services=3, num_gpus=0, num_cpus=1, node_timeout=20),
    ):
        pass


def test_a_node_without_the_package(cluster):
    with (
        pytest.raises(residuum.ResiduumError, match=r"on the node .*the services are not installed.*residuum-server"),
        residuum.ray.serve("model", num_gpus=0),
    ):
        pass


def test_a_node_without_that_python(cluster):
    with (
        pytest.raises(residuum.ResiduumError, match=r"on the node .*/no/python cannot be started"),
        residuum.ray.serve("model", num_gpus=0, python="/no/python"),
    ):
        pass


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [("/no/model", {}, "the model folder /no/model does not exist"), ("model", {"listen": "0.0.0.0:1"}, "--listen")],
)
def test_services_that_do_not_start(cluster, model, settings, why):
    with (
        pytest.raises(residuum.ResiduumError, match=rf"on the node .*{why}"),
        residuum.ray.serve(model, num_gpus=0, python=PYTHON, **settings),
    ):
        pass
