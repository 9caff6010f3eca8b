"""deploy/kubernetes matches Kubernetes' schemas, and agrees with the services that it starts."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonpatch
import kubernetes_validate
import pytest
import yaml

from inference_svc.settings import InferenceSettings
from residuum.cli.main import make_parser
from residuum.wire.endpoints import parse_endpoint
from residuum.wire.tokens import make_token
from store_svc.settings import StoreSettings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
# The oldest version with all used features (volume retention of StatefulSets is stable since 1.32), and the newest.
VERSIONS = ["1.32", kubernetes_validate.latest_version()]
SETTINGS = {"store": StoreSettings, "inference": InferenceSettings}
SERVICES = {"store": "residuum.v1.StoreService", "inference": "residuum.v1.InferenceService"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "MiB": 1 << 20, "GiB": 1 << 30}


def documents(folder):
    """The resources that `kubectl apply -k` sends, without the names and labels that kustomize adds."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found = []
    for resource in kustomization["resources"]:
        path = folder / resource
        found += documents(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for patch in kustomization.get("patches", []):
        (at,) = (
            at
            for at, item in enumerate(found)
            if (item["kind"], item["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])
        )
        found[at] = jsonpatch.apply_patch(found[at], yaml.safe_load((folder / patch["path"]).read_text()))
    return found


@pytest.fixture(params=["base", "tls"])
def flavour(request):
    return request.param


@pytest.fixture
def found(flavour):
    return documents(FOLDER / flavour)


def one(found, kind, name):
    (item,) = (item for item in found if (item["kind"], item["metadata"]["name"]) == (kind, name))
    return item


@pytest.fixture(params=["store", "inference"])
def name(request):
    return request.param


@pytest.fixture
def workload(found, name):
    return one(found, "StatefulSet" if name == "store" else "Deployment", name)


@pytest.fixture
def pod(workload):
    return workload["spec"]["template"]["spec"]


@pytest.fixture
def container(pod):
    (container,) = pod["containers"]
    return container


@pytest.fixture
def environment(container):
    given = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    return {key: value.replace("$(POD_NAMESPACE)", "residuum") for key, value in given.items()}


@pytest.fixture
def settings(environment, name, monkeypatch, tmp_path):
    """The service's settings in its container, with files where its secrets are mounted."""
    for key in filter(re.compile("RESIDUUM_").match, list(os.environ)):
        monkeypatch.delenv(key)
    of_image = {"RESIDUUM_LISTEN": "0.0.0.0:50051"}
    if name == "store":
        of_image = {"RESIDUUM_LISTEN": "0.0.0.0:50052", "RESIDUUM_PATH": "/data"}
    for key, value in {**of_image, **environment}.items():
        monkeypatch.setenv(key, mounted(value, tmp_path))
    return SETTINGS[name]()


def mounted(value, folder):
    """Return the value of a setting, or a file in place of the one that it names."""
    if not re.match(r"/(tls|tokens|store-token)/", value):
        return value
    file = folder / Path(value).name
    file.write_text(make_token() if value.endswith(".token") else "-----BEGIN CERTIFICATE-----\n")
    return str(file)


def size(text):
    number, unit = re.fullmatch(r"(\d+)([A-Z]iB?)", text).groups()
    return int(number) * UNITS[unit]


# ---------------------------------------------------------------------------------------------------------- as a whole


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_match_the_kubernetes_schemas(found, version):
    for item in found:
        kubernetes_validate.validate(item, version, strict=True)


def test_the_schema_check_detects_mistakes(found):
    """The schema check detects a misspelt name and a value of the wrong type."""
    workload = one(found, "Deployment", "inference")
    for path, value in (("/spec/replica", 1), ("/spec/replicas", "one"), ("/spec/template/spec/container", [])):
        wrong = jsonpatch.apply_patch(workload, [{"op": "add", "path": path, "value": value}])
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_services_name_the_protocol_that_they_speak(found, flavour, name):
    (port,) = one(found, "Service", name)["spec"]["ports"]
    assert port["appProtocol"] == {"base": "kubernetes.io/h2c", "tls": "https"}[flavour]


def test_every_file_is_in_the_kustomization(flavour):
    folder = FOLDER / flavour
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    named = {*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", []))}
    assert {file.name for file in folder.iterdir()} - {"kustomization.yaml"} == named - {"../base"}


def test_both_flavours_have_the_same_resources():
    base, tls = (documents(FOLDER / flavour) for flavour in ("base", "tls"))
    assert [(item["kind"], item["metadata"]["name"]) for item in base] == [
        (item["kind"], item["metadata"]["name"]) for item in tls
    ]


@pytest.fixture
def kustomize():
    """A function from a folder to the resources that `kubectl apply --kustomize` sends, by any installed kustomize."""
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            break
    else:
        pytest.skip("no kubectl and no kustomize here")

    def build(folder):
        built = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
        return list(yaml.safe_load_all(built.stdout))

    return build


def test_kustomize_builds_the_same_resources(kustomize, found, flavour):
    built = kustomize(FOLDER / flavour)
    assert len(built) == len(found)
    for item in built:
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)
        ours = one(found, item["kind"], item["metadata"]["name"])
        if item["kind"] in {"StatefulSet", "Deployment"}:
            assert item["spec"]["template"]["spec"] == ours["spec"]["template"]["spec"]
        if item["kind"] != "Namespace":
            assert item["metadata"]["namespace"] == "residuum"
        assert item["metadata"]["labels"]["app.kubernetes.io/part-of"] == "residuum"


def test_kustomize_builds_the_documented_kustomization(kustomize, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    example = documented_kustomization()
    example["resources"] = ["../kubernetes/tls"]
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(example))
    (container,) = one(kustomize(mine), "Deployment", "inference")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/residuum-inference-gpu:0.1.0"
    environment = {item["name"]: item.get("value") for item in container["env"]}
    assert environment["RESIDUUM_MODEL"].startswith("meta-llama/")
    assert environment["RESIDUUM_TLS_CERT"]  # the other resources are unchanged


def documented_kustomization():
    """The kustomization is that of deploy/README.md."""
    blocks = re.findall(r"```yaml\n(.*?)```", (FOLDER.parent / "README.md").read_text(), flags=re.DOTALL)
    (example,) = (item for item in map(yaml.safe_load, blocks) if item.get("kind") == "Kustomization")
    return example


def test_the_documented_kustomization_names_existing_resources(found):
    """The images, the container and the setting that it names exist."""
    example = documented_kustomization()
    assert example["resources"][0].endswith("deploy/kubernetes/tls")
    workloads = [item for item in found if item["kind"] in {"StatefulSet", "Deployment"}]
    images = {item["spec"]["template"]["spec"]["containers"][0]["image"] for item in workloads}
    assert {image["name"] for image in example["images"]} == images
    (patch,) = example["patches"]
    target = one(found, patch["target"]["kind"], patch["target"]["name"])
    changed = yaml.safe_load(patch["patch"])
    assert (changed["kind"], changed["metadata"]["name"]) == (target["kind"], target["metadata"]["name"])
    (container,) = changed["spec"]["template"]["spec"]["containers"]
    (known,) = target["spec"]["template"]["spec"]["containers"]
    assert container["name"] == known["name"]
    assert {item["name"] for item in container["env"]} <= {item["name"] for item in known["env"]}


# ------------------------------------------------------------------------------------------------------- each service


def test_pods_are_confined(pod, container):
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["fsGroup"] == 10001  # the user of the images
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["cpu"]


def test_the_environment_names_settings(environment, name, flavour):
    of_clients = {"RESIDUUM_TLS_CA"} if flavour == "tls" else set()  # the probes are clients
    known = {f"RESIDUUM_{field.upper()}" for field in SETTINGS[name].model_fields}
    assert {key for key in environment if key.startswith("RESIDUUM_")} - known == of_clients


def test_settings_are_valid_and_callers_need_tokens(settings, flavour):
    assert settings.requires_authentication
    assert settings.insecure is (flavour == "base")
    assert (settings.tls_cert is not None) is (flavour == "tls")


def test_ports_agree(found, container, settings, name):
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "grpc": parse_endpoint(settings.listen)[1],
        "metrics": parse_endpoint(settings.metrics)[1],
    }
    (port,) = one(found, "Service", name)["spec"]["ports"]
    assert port["port"] == ports["grpc"]


def test_probes_check_the_containers_own_service_over_grpc(container, settings, name, flavour):
    port = parse_endpoint(settings.listen)[1]
    for probe in PROBES:
        asked = container[probe]
        if flavour == "base":
            assert asked["grpc"] == {"port": port, "service": SERVICES[name]}
            assert "exec" not in asked
        else:  # the kubelet speaks no TLS
            assert "grpc" not in asked
            program, *arguments = asked["exec"]["command"]
            assert program == "residuum"
            options = make_parser().parse_args(arguments)
            assert (options.endpoint, options.service) == (f"localhost:{port}", name)
            assert options.timeout < asked["timeoutSeconds"]


def test_services_are_found_by_their_pods(found, workload, name):
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert one(found, "Service", name)["spec"]["selector"].items() <= labels.items()


def test_the_grace_period_is_long_enough(pod, settings):
    assert pod["terminationGracePeriodSeconds"] > settings.grace_seconds


def test_every_mount_has_a_volume(workload, pod, container):
    claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
    volumes = [volume["name"] for volume in pod["volumes"]] + claims
    assert sorted(mount["name"] for mount in container["volumeMounts"]) == sorted(volumes)
    assert len(set(volumes)) == len(volumes)


def test_files_named_in_settings_are_mounted(container, environment):
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for value in environment.values():
        if value.startswith("/"):
            assert str(Path(value).parent) in mounts, value


# --------------------------------------------------------------------------------------------------------- the stores


@pytest.mark.parametrize("name", ["inference"])
def test_each_store_of_the_set_is_named_as_its_pod(found, settings):
    workload = one(found, "StatefulSet", "store")
    service = workload["spec"]["serviceName"]
    assert one(found, "Service", service)["spec"]["clusterIP"] == "None"
    (port,) = one(found, "Service", service)["spec"]["ports"]
    pods = [f"store-{number}" for number in range(workload["spec"]["replicas"])]
    assert [store.name for store in settings.stores] == pods
    assert [store.endpoint for store in settings.stores] == [
        f"{pod}.{service}.residuum.svc:{port['port']}" for pod in pods
    ]


@pytest.mark.parametrize("name", ["store"])
def test_a_store_is_smaller_than_its_volume(workload, settings, container):
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    assert settings.max_bytes < size(claim["spec"]["resources"]["requests"]["storage"])
    (place,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == claim["metadata"]["name"])
    assert str(settings.path) == place
    assert workload["spec"]["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}


@pytest.mark.parametrize("name", ["store"])
def test_a_stores_limits_fit_its_container(pod, container, settings):
    files = sum(size(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"] if "emptyDir" in volume)
    probe = 64 << 20  # with TLS the probe is a command
    bound, limit = settings.memory_bound_bytes, size(container["resources"]["limits"]["memory"])
    assert bound + files + probe < limit
    text = (FOLDER.parent / "README.md").read_text()
    assert f"{bound / 2**30:.1f} GiB of {limit >> 30}" in text
    archiving = settings.model_copy(update={"archive": "s3://bucket/store"}).memory_bound_bytes
    (told,) = re.findall(rf"\| {archiving / 2**30:.1f} GiB: set `limits.memory: (\w+)`", text)
    assert archiving + files + probe < size(told)


def test_stores_go_one_at_a_time(found):
    budget = one(found, "PodDisruptionBudget", "store")["spec"]
    assert budget["maxUnavailable"] == 1
    labels = one(found, "StatefulSet", "store")["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()


# ----------------------------------------------------------------------------------------------- the inference service


@pytest.mark.parametrize("name", ["inference"])
def test_gpus_and_memory_suffice(pod, container, settings):
    limits = container["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == settings.tensor_parallel_size
    (shared,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    assert shared["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert size(limits["memory"]) > size(shared["sizeLimit"]) + (settings.ring_mib << 20) + (8 << 30)


# -------------------------------------------------------------------------------------------------- who reaches whom


def allowed(policy, direction, name):
    """The ports that a policy opens to (or from) the pods of a name."""
    side = "from" if direction == "ingress" else "to"
    return {
        port["port"]
        for rule in policy["spec"].get(direction, [])
        for peer in rule.get(side, [])
        if peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name") == name
        and "namespaceSelector" not in peer
        for port in rule["ports"]
    }


def test_network_policies_deny_by_default(found):
    deny = one(found, "NetworkPolicy", "deny-all")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for name in SETTINGS:
        policy = one(found, "NetworkPolicy", name)["spec"]
        assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
        labels = policy["podSelector"]["matchLabels"]
        workload = one(found, "StatefulSet" if name == "store" else "Deployment", name)
        assert labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_the_inference_service_reaches_the_stores_on_both_sides(found):
    store, inference = (one(found, "NetworkPolicy", name) for name in ("store", "inference"))
    assert allowed(store, "ingress", "inference") == allowed(inference, "egress", "store") == {50052}
    assert "egress" not in store["spec"]


def test_commented_out_rules_are_valid():
    """Without the comment marks, each rule matches the schema."""
    text = (FOLDER / "base" / "network.yaml").read_text()
    uncommented = re.sub(r"^( +)# ", r"\1", text, flags=re.MULTILINE)
    rules = [
        one(list(yaml.safe_load_all(text)), "NetworkPolicy", "inference")["spec"]["egress"]
        for text in (text, uncommented)
    ]
    assert len(rules[1]) == len(rules[0]) + 2  # a resolver on the node, a collector of traces
    for item in yaml.safe_load_all(uncommented):
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)


def test_only_the_monitoring_reaches_the_metrics(found):
    for name in SETTINGS:
        for rule in one(found, "NetworkPolicy", name)["spec"]["ingress"]:
            if {"port": 9464} in rule["ports"]:
                assert rule["ports"] == [{"port": 9464}]
                assert rule["from"] == [
                    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
                ]


def test_anchors_do_not_cross_documents():
    """YAML anchors do not apply across documents, and kustomize differs from other parsers here."""
    for file in FOLDER.rglob("*.yaml"):
        assert not re.search(r"(^|\s)[&*][A-Za-z]", re.sub(r"#.*|\"[^\"]*\"", "", file.read_text())), file
