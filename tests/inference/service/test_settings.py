"""Settings as an operator uses them: through the command, before any heavy import."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import inference_svc
from inference_svc.settings import InferenceSettings
from svc_common.environment import OTHERS, SETTINGS, unknown_variables
from svc_common.settings import load_settings, log_unknown_variables

ROOT = Path(inference_svc.__file__).parents[1]


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "inference_svc", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


BAD = {
    "--listen": (["--listen", "nonsense"], "is not host:port"),
    "--store": (["--store", "localhost"], "is not host:port"),
    "--advertise-store": (["--advertise-store", "x:99999"], "is not host:port"),
    "--max-num-seqs": (["--max-num-seqs", "0"], "greater than or equal to 1"),
    "--dtype": (["--dtype", "int4"], "'bfloat16'"),
    "--capture-encoding": (["--capture-encoding", "project"], "'rp8'"),
    "--capture-rp-k": (["--capture-rp-k", "0"], "greater than or equal to 1"),
    "--vector-wait-seconds": (["--vector-wait-seconds", "0"], "greater than 0"),
    "--engine-args": (["--engine-args", '{"worker_cls": "mine"}'], "worker_cls cannot be set here"),
    "engine_args": (["--engine-args", "{"], "Parsing error"),
    "--lora-modules": (["--lora-modules", "joy=/a,calm"], "'calm' is not name=folder"),
    "LORA_MODULES": (["--lora-modules", "joy=/a,joy=/b"], "two adapters are named 'joy'"),
    "adapter 'x'": (["--lora-modules", "x=org/a"], "which is the name of the model"),
    "--max-running": (["--max-running", "5"], "unrecognized arguments"),
}


@pytest.mark.parametrize(("name", "case"), BAD.items(), ids=BAD)
def test_a_bad_setting_is_named_and_ends_the_start(name, case, monkeypatch, capsys):
    arguments, allowed = case
    with pytest.raises(SystemExit) as ended:
        load_settings(InferenceSettings, "program", ["--model", "x", *arguments])
    told = f"{ended.value.code}{capsys.readouterr().err}"
    assert name in told
    assert allowed in told


def test_the_command_ends_with_an_error_and_names_the_setting():
    ended = run("--model", "x", "--listen", "nonsense")
    assert ended.returncode not in (0, None)
    assert "--listen" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("flag", "value"), [("--model", "/nowhere/x"), ("--lora-modules", "joy=/nowhere/x")])
def test_a_folder_that_does_not_exist_ends_the_start_before_the_model_is_loaded(flag, value):
    ended = run("--model", "x", flag, value)
    assert ended.returncode == 1
    assert f"{flag} (RESIDUUM_{flag[2:].upper().replace('-', '_')}): there is no folder '/nowhere/x'." in ended.stderr


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch, tmp_path):
    """vLLM does not know it, and takes such a path for a name on the Hugging Face hub."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny").mkdir()
    settings = load_settings(InferenceSettings, "program", ["--model", "~/tiny", "--lora-modules", "joy=~/tiny"])
    assert (settings.model, settings.adapters) == (f"{tmp_path}/tiny", {"joy": f"{tmp_path}/tiny"})


def test_a_wrong_flag_is_told_in_one_line():
    ended = run("--model", "x", "--nosuch")
    assert ended.returncode == 2
    told = "unrecognized arguments: --nosuch. python -m inference_svc --help lists all flags.\n"
    assert ended.stderr == f"python -m inference_svc: {told}"


def test_a_model_is_needed():
    ended = run(RESIDUUM_LISTEN="127.0.0.1:0")
    assert ended.returncode != 0
    assert "--model (RESIDUUM_MODEL): this setting is required" in ended.stderr


def test_help_explains_every_setting_without_loading_vllm():
    code = (
        "import runpy, sys; sys.argv = ['inference_svc', '--help']\n"
        "try: runpy.run_module('inference_svc', run_name='__main__')\n"
        "except SystemExit as end: print('heavy:', sorted({'vllm', 'torch'} & sys.modules.keys()), end.code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "heavy: [] 0" in ended.stdout
    for name, field in InferenceSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in ended.stdout
        assert field.description.split()[0] in ended.stdout
    assert "--config FILE" in ended.stdout
    text = " ".join(ended.stdout.split())
    assert "(default: resid_post)" in text
    assert not re.search(r"default factory|default: \(", text)
    for setting in re.split(r" (?=--[a-z])", text):
        assert not re.search(r"Default: .*\(default", setting), f"two defaults: {setting}"
    assert not re.search(r"Path\b|ByteSize|tuple\[|dict\[| str\b| int\b| float\b|null|default: \(\)", ended.stdout)


def test_flags_go_before_the_environment_and_that_before_the_file(monkeypatch, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('model = "file"\nseed = 1\nring_mib = 1\n')
    monkeypatch.setenv("RESIDUUM_SEED", "2")
    monkeypatch.setenv("RESIDUUM_RING_MIB", "2")
    settings = load_settings(InferenceSettings, "program", ["--config", str(file), "--ring-mib", "3"])
    assert (settings.model, settings.seed, settings.ring_mib) == ("file", 2, 3)


def load(file, text):
    file.write_text(text)
    return load_settings(InferenceSettings, "program", ["--config", str(file)])


@pytest.mark.parametrize("sites", ['["resid_post", "attn_out"]', '"resid_post, attn_out"'])
@pytest.mark.parametrize("name", ["capture-sites", "capture_sites"])
def test_a_file_may_write_names_as_flags_are_written(tmp_path, name, sites):
    settings = load(tmp_path / "x.toml", f'model = "x"\n{name} = {sites}\n[engine-args]\nquantization = "fp8"\n')
    assert settings.capture_sites == ("resid_post", "attn_out")
    assert settings.engine_args == {"quantization": "fp8"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ring-mib = 1\nring_mib = 2", "sets ring_mib twice"),
        ("capture-site = []", "--capture-site (RESIDUUM_CAPTURE_SITE): unknown setting. Did you mean --capture-sites?"),
        ("[inference]", "unknown setting. See --help"),
        (
            'capture-sites = ["resid"]',
            "'resid' is not a site. Choose among resid_post, resid_pre, attn_out, mlp_out, attn_in, resid_mid, mlp_in",
        ),
        ("model = ", "x.toml is not TOML"),
    ],
)
def test_an_invalid_settings_file_is_an_error(tmp_path, text, told):
    with pytest.raises(SystemExit, match="bad settings") as ended:
        load(tmp_path / "x.toml", text)
    assert told in ended.value.code


@pytest.mark.parametrize("text", ['store-token = "rsd_secret"', 'engine-args = {model = "x", hf_token = "rsd_secret"}'])
def test_no_error_shows_a_token(tmp_path, text):
    with pytest.raises(SystemExit, match="bad settings") as ended:
        load(tmp_path / "x.toml", text)
    assert "rsd_secret" not in ended.value.code


SLIPS = {
    "RESIDUUM_RING_MB": "RESIDUUM_RING_MIB",
    "RESIDUUM_TOKENS_FILE": "RESIDUUM_TOKENS",
    "RESIDUUM_STORES": "RESIDUUM_STORE",
    "residuum_insecur": "RESIDUUM_INSECURE",
}


@pytest.mark.parametrize(("name", "meant"), SLIPS.items())
def test_a_misspelt_variable_is_an_error(monkeypatch, name, meant):
    monkeypatch.setenv(name, "rsd_secret")
    with pytest.raises(SystemExit, match="bad settings") as ended:
        load_settings(InferenceSettings, "program", ["--model", "x", "--ring-mib", "5"])
    assert f"  {name}: unknown setting. Did you mean " in ended.value.code
    assert meant in ended.value.code.replace("?", " ").split()
    assert "rsd_secret" not in ended.value.code, "it may be a token"


def test_all_bad_settings_are_reported_at_once(monkeypatch):
    monkeypatch.setenv("RESIDUUM_MODL", "x")
    with pytest.raises(SystemExit) as ended:
        load_settings(InferenceSettings, "program", ["--listen", "nonsense"])
    for told in ("--listen", "--model (RESIDUUM_MODEL): this setting is required", "RESIDUUM_MODL: unknown setting"):
        assert told in ended.value.code


def test_an_unknown_variable_is_logged_and_ignored(monkeypatch, capsys):
    monkeypatch.setenv("RESIDUUM_XYZZY", "1")
    load_settings(InferenceSettings, "program", ["--model", "x"])
    log_unknown_variables(InferenceSettings)
    assert "RESIDUUM_XYZZY" in "".join(capsys.readouterr())


def test_variables_of_other_parts_of_the_project_are_ignored_silently(monkeypatch, capsys, tmp_path):
    for name in SETTINGS - {name.upper() for name in InferenceSettings.model_fields} | OTHERS:
        monkeypatch.setenv(f"RESIDUUM_{name}", "1")
    load(tmp_path / "x.toml", 'model = "x"')
    log_unknown_variables(InferenceSettings)
    assert "".join(capsys.readouterr()) == ""


def test_variables_of_kubernetes_services_are_ignored_silently(monkeypatch):
    links = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_50052_TCP", "PORT_50052_TCP_ADDR"]
    monkeypatch.setenv("RESIDUUM_PORT", "1")
    assert unknown_variables(["port_file"]) == {"RESIDUUM_PORT": ["RESIDUUM_PORT_FILE"]}
    for service, link in itertools.product(["RESIDUUM", "RESIDUUM_PORTS"], links):
        monkeypatch.setenv(f"{service}_{link}", "1")
    assert unknown_variables(["port_file"]) == {}


def test_engine_args_are_a_json_object():
    settings = load_settings(
        InferenceSettings, "program", ["--model", "x", "--engine-args", '{"enable_prefix_caching": false}']
    )
    assert settings.engine_args == {"enable_prefix_caching": False}


def test_the_default_encoding_stands_in_the_environment(monkeypatch):
    monkeypatch.setenv("RESIDUUM_CAPTURE_ENCODING", "rp8")
    monkeypatch.setenv("RESIDUUM_CAPTURE_RP_K", "256")
    settings = load_settings(InferenceSettings, "program", ["--model", "x", "--capture-topk-k", "32"])
    assert (settings.capture_encoding, settings.capture_rp_k, settings.capture_topk_k) == ("rp8", 256, 32)


def test_no_store_is_the_default():
    assert load_settings(InferenceSettings, "program", ["--model", "x"]).store == ()


TWO = ["--store", "a=h:1,b=h:2"]


@pytest.mark.parametrize(
    ("arguments", "stores", "advertised"),
    [
        (["--store", "h:1"], ["h:1 h:1"], ["h:1 h:1"]),
        (["--store", "h:1", "--advertise-store", "x:9"], ["h:1 h:1"], ["h:1 x:9"]),
        (TWO, ["a h:1", "b h:2"], ["a h:1", "b h:2"]),
        (["--store", "a=h:1", "--store", "b=h:2"], ["a h:1", "b h:2"], ["a h:1", "b h:2"]),
        ([*TWO, "--advertise-store", "b=x:1"], ["a h:1", "b h:2"], ["a h:1", "b x:1"]),
        ([*TWO, "--advertise-store", "x:1, x:2"], ["a h:1", "b h:2"], ["a x:1", "b x:2"]),
    ],
)
def test_stores_and_where_clients_reach_them(arguments, stores, advertised):
    settings = load_settings(InferenceSettings, "program", ["--model", "x", *arguments])
    assert [" ".join(store) for store in settings.stores] == stores
    assert [" ".join(store) for store in settings.advertised_stores] == advertised


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--store", "a=h:1,a=h:2"], "two stores share the name 'a'"),
        (["--store", "a=h:1,h:1"], "two stores share the endpoint 'h:1'"),
        (["--store", "a=h"], "'h' is not host:port"),
        ([*TWO, "--advertise-store", "x:1"], "has 1 endpoints without names, but there are 2 stores"),
        ([*TWO, "--advertise-store", "c=x:1"], "names c, which --store does not have. Choose among its stores: a, b"),
        (["--advertise-store", "x:1"], "there is no store. Give --store."),
    ],
)
def test_invalid_lists_of_stores_are_refused(arguments, told):
    with pytest.raises(SystemExit, match=told):
        load_settings(InferenceSettings, "program", ["--model", "x", *arguments])
