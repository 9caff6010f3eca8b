"""`residuum serve` and `residuum.serve`: a real store, and a scripted inference service instead of vLLM."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import residuum
from residuum.cli import main
from residuum.cli.services import serve as command
from residuum.wire.tokens import token_hash
from svc_common import early_end, serve_command
from svc_common.launcher import Service, ServiceFailedError, is_free, running_services, start_inference, terminable

pytestmark = pytest.mark.slow  # it starts many processes

ROOT = Path(__file__).parents[3]
PROGRAM = """
import signal, sys
from residuum.cli import main
from svc_common import serve_command as serve
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
serve._INFERENCE, serve._NEEDED, serve.USUAL_PORTS = "tests.client.support.scripted_inference", ("lmdb",), (0, 0)
sys.exit(main(["serve", "--model", "peer", *sys.argv[1:]]))
"""


@contextmanager
def started(folder, *flags):
    """Runs `residuum serve` in a folder, in its own process. Kills it if a test does not end it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *flags], cwd=folder, env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def endpoints(process):
    """Return what it prints when both services are ready: store, inference and captures."""
    lines = [process.stdout.readline().split(maxsplit=1) for _ in range(3)]
    assert [line[:1] for line in lines] == [["store"], ["inference"], ["captures"]], process.stderr.read()
    return [line[1].strip() for line in lines]


def stop(process, how):
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err.endswith("stopped\n")


def test_captures_are_kept_and_both_services_end(tmp_path):
    with started(tmp_path, "--max-model-len", "64") as process:
        store, inference, captures = endpoints(process)
        assert f'residuum.Client("{inference}")' in "".join(process.stdout.readline() for _ in range(5))
        assert captures == f"kept in {tmp_path / 'residuum-data'}"
        with residuum.Client(inference) as client:
            reply = client.generate([1, 2, 3], max_tokens=2, capture=residuum.Capture(layers=[1]))
            before = client.activations(reply)[1]
        stop(process, signal.SIGINT)
    assert all(is_free(int(endpoint.rpartition(":")[2])) for endpoint in (store, inference))
    with started(tmp_path / "..", "--data", str(tmp_path / "residuum-data")) as process:
        _, inference, _ = endpoints(process)
        with residuum.Client(inference) as client:
            assert (client.activations(reply.request_id)[1] == before).all()
        stop(process, signal.SIGTERM)


def test_the_settings_file_of_the_environment_is_not_the_stores(scripted, tmp_path, monkeypatch):
    (tmp_path / "inference.toml").write_text("max-num-seqs = 32")
    monkeypatch.setenv("RESIDUUM_CONFIG", "inference.toml")
    with serve_command.serving("peer", temporary=True, progress=False) as (store, _):
        assert store.is_running


def test_a_second_start_in_the_same_folder_does_not_end_the_first(scripted, tmp_path):
    with serve_command.serving("peer", progress=False) as (store, inference):
        before = store.endpoint, inference.endpoint
        with (
            pytest.raises(ServiceFailedError, match=r"is in use by another store.*--data of residuum serve"),
            serve_command.serving("peer", progress=False),
        ):
            pass
        assert (store.endpoint, inference.endpoint) == before


def test_temporary_captures_leave_nothing(tmp_path):
    with started(tmp_path, "--temporary") as process:
        assert endpoints(process)[2] == "deleted at the end"
        stop(process, signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_terminal_ends_both_services_in_order(tmp_path):
    with started(tmp_path) as process:
        store, inference, _ = endpoints(process)
        process.send_signal(signal.SIGHUP)  # from the kernel
        stop(process, signal.SIGHUP)  # and from the shell
    assert all(is_free(int(endpoint.rpartition(":")[2])) for endpoint in (store, inference))
    assert '"event": "stopped"' in (tmp_path / "residuum-data/store.log").read_text()


@pytest.mark.parametrize("model", ["peer", "never"])
def test_both_services_end_if_the_command_is_killed(tmp_path, model):
    with started(tmp_path, "--model", model) as process:
        while "loading the model ... 0 s" not in process.stderr.readline():
            assert process.poll() is None
        if model == "peer":
            endpoints(process)
        services = psutil.Process(process.pid).children()
        assert len(services) == 2
        process.kill()
        try:
            psutil.wait_procs(services, timeout=60)
            assert [service for service in services if service.is_running()] == []
        finally:
            for service in services:
                with contextlib.suppress(psutil.NoSuchProcess):
                    service.kill()
    assert '"event": "stopped"' in (tmp_path / "residuum-data/store.log").read_text()


def test_a_service_that_is_started_without_the_launcher_outlives_its_starter(tmp_path):
    starter = "import subprocess, sys; print(subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=2).pid)"
    words = ["-m", "store_svc", "--path", "data", "--listen=127.0.0.1:0", "--port-file", "port"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    with (tmp_path / "log").open("w") as log:
        made = subprocess.run(
            [sys.executable, "-c", starter, *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=log, text=True, check=True,
        )  # fmt: skip
    store = psutil.Process(int(made.stdout))
    try:
        while not (tmp_path / "port").exists():
            assert store.is_running()
            time.sleep(0.05)
        time.sleep(2 * early_end._POLL_SECONDS)
        assert store.is_running()
    finally:
        store.terminate()
        store.wait(60)


def test_under_nohup_a_closed_terminal_ends_nothing():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_ctrl_c_while_the_model_is_loading(tmp_path):
    with started(tmp_path, "--model", "never", "--temporary") as process:
        while "loading the model ... 0 s" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "stopped\n")


def test_a_store_that_dies_while_the_model_is_loading_is_reported_at_once(scripted, tmp_path):
    others, killed = set(psutil.Process().children()), []  # such as a store that other tests use

    def kill_store(service, _seconds):
        if service == "inference" and not killed:
            started = set(psutil.Process().children()) - others
            killed.extend(process for process in started if "store_svc" in process.cmdline())
            killed[0].kill()

    with (
        pytest.raises(ServiceFailedError, match=r"The store service was killed by signal 9\. Its log ends:"),
        running_services(
            "never",
            inference_module="tests.client.support.scripted_inference",
            timeout_seconds=20,
            waiting=kill_store,
        ),
    ):
        pass


def test_a_long_grace_period_is_not_cut_short(monkeypatch, tmp_path):
    """If the inference service were killed, captures of running requests would stay open."""
    both = [Service(name, None, tmp_path) for name in ("store", "inference")]
    monkeypatch.setattr(serve_command, "running_services", lambda *_, **__: contextlib.nullcontext(both))
    with serve_command.serving("tiny", flags=["--grace-seconds", "120"]) as (store, inference):
        assert (store.stop_seconds, inference.stop_seconds) == (60, 180)


def test_a_service_that_fails_is_reported_with_the_end_of_its_log(tmp_path):
    unknown = ["--seed", "1"]  # to the scripted service, not to the real one
    with started(tmp_path, *unknown) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "residuum: The inference service ended with code 2. Its log ends:" in err
    assert "--seed" in err


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Makes `residuum.serve` start the scripted inference service, in a folder of the test."""
    monkeypatch.setattr(serve_command, "_INFERENCE", "tests.client.support.scripted_inference")
    monkeypatch.setattr(serve_command, "_NEEDED", ())
    monkeypatch.setattr(serve_command, "USUAL_PORTS", (0, 0))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "client")]))
    monkeypatch.chdir(tmp_path)


def test_a_service_that_dies_is_reported_at_once(scripted, monkeypatch):
    serving, started = serve_command.serving, []

    @contextmanager
    def remembered(*arguments, **how):
        with serving(*arguments, **how) as services:
            started.extend(services)
            yield services

    monkeypatch.setattr(serve_command, "serving", remembered)
    with residuum.serve("peer", temporary=True, progress=False) as client, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert client.health().ok
        started[1].kill()
        until = time.monotonic() + 60
        while not told and time.monotonic() < until:
            time.sleep(0.01)
    assert [(item.category, item.filename) for item in told] == [(residuum.OutageWarning, __file__)]
    assert "The inference service has ended" in str(told[0].message)


def test_from_python(scripted, tmp_path, capfd):
    with residuum.serve("peer", data="here", max_model_len=64) as client:
        reply = client.generate([1, 2, 3], max_tokens=2, capture=residuum.Capture(layers=[1]))
        assert client.activations(reply)[1].shape[0] == 4
    assert (tmp_path / "here/data").is_dir()
    assert "loading the model ... 0 s\n" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------- without starting anything


@pytest.fixture
def asked(monkeypatch):
    """Records the calls of the server's distribution, which is replaced."""
    calls = []

    @contextmanager
    def serving(model, **how):
        calls.append((model, how))
        yield SimpleNamespace(is_running=True), SimpleNamespace(is_running=True, endpoint="localhost:1")

    server = SimpleNamespace(main=lambda **how: calls.append(how) or 0, serving=serving)
    monkeypatch.setattr(command, "installed_server", lambda: server)
    monkeypatch.setattr("residuum.serving.installed_server", lambda: server)
    return calls


def test_unknown_flags_are_passed_to_the_inference_service(asked):
    assert main(["serve", "--max-model-len", "64", "--model", "m", "--enforce-eager", "--d", "x"]) == 0
    assert main(["serve", "--model", "m", "--data", "d"]) == 0
    flags = ["--max-model-len", "64", "--enforce-eager", "--d", "x"]
    assert asked == [
        {"model": "m", "data": None, "temporary": False, "flags": flags},
        {"model": "m", "data": Path("d"), "temporary": False, "flags": []},
    ]


@pytest.mark.parametrize(
    "line", [["serve"], ["serve", "--model", "m", "--data", "d", "--temporary"], ["info", "--enforce-eager"]]
)
def test_a_wrong_command_line(asked, line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert asked == []


def test_settings_in_python_become_flags(asked):
    settings = {"enforce_eager": True, "fold_norms": False, "capture_sites": ["resid_pre", "resid_post"]}
    with residuum.serve("m", temporary=True, engine_args={"block_size": 8}, max_num_seqs=4, **settings) as client:
        assert isinstance(client, residuum.Client)
    ((model, how),) = asked
    assert (model, how["temporary"], how["data"]) == ("m", True, None)
    assert how["flags"] == [
        '--engine-args={"block_size": 8}', "--max-num-seqs=4",
        "--enforce-eager", "--no-fold-norms", "--capture-sites=resid_pre,resid_post",
    ]  # fmt: skip


def test_without_the_server_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    assert main(["serve", "--model", "m"]) == 1
    assert "pip install . './server[cuda,store]'" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="install residuum-server"), residuum.serve("m"):
        pass


INFO, WARNING, ERROR = (f'{{"event": "told", "level": "{level}"}}' for level in ("info", "warning", "error"))


@pytest.mark.parametrize(
    ("end", "temporary", "log", "told"),
    [
        ("kill -9 $$", False, [INFO], "was killed by signal 9. {stopping}\nIts log has no warnings: {log}\n"),
        ("exit 3", True, [INFO, ""], "ended with code 3. {stopping}\nIts log has no warnings\n"),
        (
            "exit 3",
            False,
            [WARNING, INFO, ERROR, "Aborted"],
            f"ended with code 3. {{stopping}}\nFrom its log:\n{WARNING}\n{ERROR}\nAborted\n",
        ),
    ],
)
@pytest.mark.parametrize(("victim", "other"), [("store", "inference"), ("inference", "store")])
def test_a_service_that_ends_is_told_before_the_other_is_stopped(
    tmp_path, monkeypatch, capsys, victim, other, end, temporary, log, told
):
    heard = []
    with subprocess.Popen(["sleep", "60"]) as lives, subprocess.Popen(["sh", "-c", end]) as ends:
        services = [Service(name, ends if name == victim else lives, tmp_path) for name in ("store", "inference")]
        (tmp_path / f"{victim}.log").write_text("\n".join(log))
        for service in services:
            (tmp_path / f"{service.name}.port").write_text("1")

        @contextmanager
        def serving(*_, **__):
            yield services
            heard.append(capsys.readouterr().err)

        monkeypatch.setattr(serve_command, "serving", serving)
        code = serve_command.main(model="m", data=None, temporary=temporary, flags=[])
        lives.kill()
    told = told.replace("{stopping}", f"Stopping the {other} service ...").replace("{log}", f"{tmp_path}/{victim}.log")
    assert (code, heard) == (1, [f"residuum: The {victim} service {told}"])


def test_a_log_is_shown_from_the_start_of_its_service(tmp_path):
    for _ in range(2):
        service = start_inference(tmp_path, "m", "", module="no_such_module")
        service.process.wait()
        assert service.log_end().count("No module named no_such_module") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nosuch"], "unrecognized arguments: --nosuch. python -m inference_svc --help lists all flags."),
        (["--max-model-len", "foo"], "--max-model-len (RESIDUUM_MAX_MODEL_LEN): Input should be a valid integer"),
        (["--seed", "1", "--store", "x:1"], "`residuum serve` sets --store itself"),
    ],
)
def test_a_wrong_flag_is_told_before_anything_starts(tmp_path, monkeypatch, capsys, flags, told):
    monkeypatch.setattr(serve_command, "_NEEDED", ())
    monkeypatch.setenv("RESIDUUM_LISTEN", "nonsense")  # does not matter: `residuum serve` sets --listen
    assert serve_command.main(model="m", data=tmp_path / "data", temporary=False, flags=flags) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"residuum serve: {told}")
    assert err.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("how", ["flags", "environment", "file"])
def test_tls_is_refused_because_the_command_would_wait_for_ever(scripted, tmp_path, monkeypatch, capsys, how):
    tls, flags = {"tls-cert": "cert.pem", "tls-key": "cert.key"}, []
    if how == "flags":
        flags = [f"--{name}={value}" for name, value in tls.items()]
    elif how == "environment":
        for name, value in tls.items():
            monkeypatch.setenv("RESIDUUM_" + name.replace("-", "_").upper(), value)
    else:
        (tmp_path / "settings.toml").write_text("\n".join(f'{name} = "{value}"' for name, value in tls.items()))
        flags = ["--config", "settings.toml"]
    assert serve_command.main(model="m", data=None, temporary=True, flags=flags) == 2
    assert "without TLS. Leave out --tls-cert, --tls-key" in capsys.readouterr().err


def test_the_store_requires_the_same_tokens(scripted, tmp_path, capsys):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[token]]\nhash = "{token_hash("a-token")}"\ntenant = "alice"\nrights = ["read"]\n')
    flags = ["--tokens", "tokens.toml"]
    assert serve_command.main(model="peer", data=None, temporary=True, flags=flags) == 2
    assert "--tokens needs --store-token-file" in capsys.readouterr().err
    (tmp_path / "store.token").write_text("another-token")
    flags += ["--store-token-file", "store.token"]
    with started(tmp_path, *flags) as process:
        endpoint = endpoints(process)[1]
        hint = "".join(iter(process.stdout.readline, "Ctrl-C stops both services.\n"))
        stop(process, signal.SIGTERM)
    assert f'residuum.Client("{endpoint}", token="YOUR TOKEN")' in hint
    with serve_command.serving("peer", temporary=True, flags=flags, progress=False) as (store, _):
        with residuum.Client(store=store.endpoint) as anybody, pytest.raises(residuum.Unauthenticated):
            list(anybody.captures())
        with residuum.Client(store=store.endpoint, token="a-token") as alice:
            assert list(alice.captures()) == []


@pytest.mark.parametrize("folder", ["file", "file/inner"])
def test_a_file_in_place_of_the_data_folder_is_told_in_words(scripted, tmp_path, capsys, folder):
    (tmp_path / "file").touch()
    assert serve_command.main(model="m", data=Path(folder), temporary=False, flags=[]) == 1
    assert f"residuum: captures and logs cannot be kept in {tmp_path / folder}, because" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--listen=0.0.0.0:1"], ["--seed", "1", "--store", "x:1"]])
def test_flags_that_serve_sets_itself_are_refused(tmp_path, flags):
    with (
        pytest.raises(ServiceFailedError, match=r"sets --(listen|store) itself"),
        serve_command.serving("m", data=tmp_path, flags=flags),
    ):
        pass


def test_missing_modules_are_reported_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve_command, "_NEEDED", ("no_such_module",))
    assert serve_command.main(model="m", data=tmp_path / "data", temporary=False, flags=[]) == 1
    assert "no_such_module cannot be imported: install residuum-server" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_progress_is_one_line_or_a_few(kind):
    stream = kind()
    line = serve_command.ProgressLine(stream, shown=True)
    for tenth in range(200):
        line.show("inference", tenth / 10)
    line.end()
    shown = [text.strip() for text in stream.getvalue().replace("\n", "\r").split("\r") if text.strip()]
    if kind is Terminal:
        assert "\n" not in stream.getvalue()
        assert shown == [f"loading the model ... {second} s" for second in range(20)]
    else:
        assert shown == ["loading the model ... 0 s", "loading the model ... 15 s"]


def test_progress_can_be_silent():
    stream = Terminal()
    line = serve_command.ProgressLine(stream, shown=False)
    line.show("store", 1.0)
    with contextlib.suppress(ValueError):
        line.end()
    assert stream.getvalue() == ""


def test_a_model_folder_that_does_not_exist_is_told_before_anything_starts(tmp_path, capsys):
    assert serve_command.main(model="/nowhere/x", data=tmp_path / "data", temporary=False, flags=[]) == 2
    assert capsys.readouterr().err.startswith("residuum serve: --model (RESIDUUM_MODEL): there is no folder")
    assert not (tmp_path / "data").exists()
