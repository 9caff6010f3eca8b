"""deploy/kubernetes/ray agrees with the commands that it runs, with the services, and with the version of Ray."""

import re
import shlex
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from residuum.cli.generation.extract_ray import check
from residuum.cli.main import make_parser

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
JOB, SERVE = (yaml.safe_load((DEPLOY / "kubernetes" / "ray" / name).read_text()) for name in ("job.yaml", "serve.yaml"))


def cluster_of(job):
    return job["spec"]["rayClusterSpec"]


def groups_of(job):
    return [cluster_of(job)["headGroupSpec"], *cluster_of(job)["workerGroupSpecs"]]


def options_of(job):
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "residuum"
    options = make_parser().parse_args(arguments)
    check(options)
    assert options.ray == "auto"
    return options


def test_the_command_is_one_of_ours():
    options = options_of(JOB)
    assert options.endpoint == ["inference.residuum.svc:50051"]
    assert options.actors <= sum(group["replicas"] for group in cluster_of(JOB)["workerGroupSpecs"])


def test_each_service_that_a_job_starts_has_a_gpu_and_a_python():
    options = options_of(SERVE)
    (group,) = cluster_of(SERVE)["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * group["minReplicas"]
    assert options.services * options.gpus <= gpus
    assert container["image"] == "residuum-ray-services"
    folder = str(Path(options.python).parents[1])
    assert f"python -m venv {folder} " in (DEPLOY / "ray.Dockerfile").read_text()


def test_the_service_that_it_names_is_there():
    (service,) = (
        item
        for item in yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "inference.yaml").read_text())
        if item["kind"] == "Service"
    )
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == ("inference", 50051)


@pytest.mark.parametrize("job", [JOB, SERVE], ids=["job", "serve"])
def test_the_pods_match_the_kubernetes_schemas(job):
    for group in groups_of(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_its_pods_are_clients_with_a_token():
    policies = yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "network.yaml").read_text())
    (policy,) = (item for item in policies if item["metadata"]["name"] == "inference")
    allowed = policy["spec"]["ingress"][0]["from"][1]
    for group in groups_of(JOB):
        template = group["template"]
        assert allowed["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        (container,) = template["spec"]["containers"]
        environment = {item["name"]: item["value"] for item in container["env"]}
        (mount,) = container["volumeMounts"]
        assert environment["RESIDUUM_TOKEN_FILE"].startswith(f"{mount['mountPath']}/")
        assert [volume["name"] for volume in template["spec"]["volumes"]] == [mount["name"]]
        assert group["template"]["spec"]["containers"][0]["image"] == "residuum-ray"


def test_ray_has_one_version():
    (pinned,) = re.findall(r"^ray==(\S+)$", (DEPLOY.parent / "requirements" / "ray.lock").read_text(), re.MULTILINE)
    assert [cluster_of(job)["rayVersion"] for job in (JOB, SERVE)] == [pinned] * 2
    (image,) = re.findall(
        r"^ARG BASE=rayproject/ray:(\S+)-py311$", (DEPLOY / "ray.Dockerfile").read_text(), re.MULTILINE
    )
    assert image == pinned
