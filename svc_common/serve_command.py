"""`residuum serve` and `residuum.serve()`: run both services on this machine for one user, until they are stopped.

The client finds this module through the entry point `serve` in the group `residuum.commands`. It never imports it.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from residuum.rpc.extras import install_server
from svc_common import services_of_actor
from svc_common.launcher import LOOPBACK, NO_FILE, ServiceFailedError, is_free, running_services
from svc_common.settings import BadSettingsError, read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from svc_common.launcher import Service
    from svc_common.services_of_actor import ServicesPlan

DEFAULT_DATA = Path("residuum-data")
"""The default folder of captures and logs, relative to the current folder."""

USUAL_PORTS = (50052, 50051)
"""The documented ports of the store and of the inference service. If one is taken, both services use other ports."""

_OURS = ("--listen", "--port-file", "--store")
_INFERENCE = "inference_svc"
_INFERENCE_SETTINGS = "inference_svc.settings:InferenceSettings"
_NEEDED = ("lmdb", "vllm")
_POLL_SECONDS = 0.2
_PLAIN_SECONDS = 15
"""Seconds between progress lines, for a stream that cannot rewrite a line."""

_TO_TRY = """\
store      {store}
inference  {inference}
captures   {captures}

To try, in Python:

    import residuum
    client = residuum.Client("{inference}"{token})
    print(client.generate("The capital of France is", max_tokens=8).text)

Ctrl-C stops both services."""


class WrongCommandLineError(ServiceFailedError):
    """The arguments are invalid. Nothing has been started."""


@contextmanager
def serving(
    model: str, *, data: Path | None = None, temporary: bool = False, flags: Sequence[str] = (), progress: bool = True
) -> Iterator[tuple[Service, Service]]:
    """Run both services for as long as the context lasts. Yields (store, inference), both serving.

    Args:
        model: The model's folder, or its name on the Hugging Face hub.
        data: Where captures and logs are kept (default: `DEFAULT_DATA`).
        temporary: Delete captures and logs at the end.
        flags: Further flags of the inference service.
        progress: Show on stderr which service is starting.

    Raises:
        WrongCommandLineError: The arguments are invalid.
        ServiceFailedError: A service did not become ready.
    """
    if temporary and data is not None:
        raise WrongCommandLineError("set either a data folder or temporary, not both")
    _check_can_serve(flags, needs_store=True)
    settings = _checked_settings(model, flags)
    store_arguments = [*NO_FILE, *_store_tokens(settings)]
    ports = USUAL_PORTS if all(map(is_free, USUAL_PORTS)) else (0, 0)
    line = ProgressLine(sys.stderr, shown=progress)
    # No timeout, because downloading a model may take long. Ctrl-C ends the wait.
    with (
        tempfile.TemporaryDirectory(prefix="residuum-") as scratch,
        running_services(
            model,
            ports=ports,
            inference_arguments=flags,
            store_arguments=store_arguments,
            inference_module=_INFERENCE,
            cwd=Path.cwd(),
            folder=Path(scratch) if temporary else (data or DEFAULT_DATA).expanduser().absolute(),
            timeout_seconds=float("inf"),
            waiting=line.show,
            up=line.end,
        ) as both,
    ):
        both[1].requires_token = settings.tokens is not None
        both[1].stop_seconds += settings.grace_seconds  # for running requests; captures and rows need the rest
        yield both


def main(*, model: str, data: Path | None, temporary: bool, flags: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code."""
    code = 0
    try:
        with serving(model, data=data, temporary=temporary, flags=flags) as (store, inference):
            captures = "deleted at the end" if temporary else f"kept in {store.folder}"
            token = ', token="YOUR TOKEN"' if inference.requires_token else ""
            hint = _TO_TRY.format(store=store.endpoint, inference=inference.endpoint, captures=captures, token=token)
            print(hint, flush=True)  # noqa: T201 - a command prints
            while inference.is_running and store.is_running:
                time.sleep(_POLL_SECONDS)
            code = 1
            ended, other = (store, inference) if inference.is_running else (inference, store)
            _tell(f"residuum: The {ended.name} service {ended.ending}. Stopping the {other.name} service ...")
            where = "" if temporary else f": {ended.log}"
            warnings = ended.log_warnings()
            _tell(f"From its log:\n{warnings}" if warnings else f"Its log has no warnings{where}")
    except KeyboardInterrupt:
        _tell("stopped")
    except WrongCommandLineError as error:
        _tell(f"residuum serve: {error}")
        code = 2
    except ServiceFailedError as error:
        _tell(f"residuum: {error}")
        code = 1
    return code


def serve_for_actor() -> int:
    """Run the services of a Ray actor, which is at the other end of stdin and stdout; return the exit code."""
    return services_of_actor.main(_check_plan)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command prints


def _check_plan(plan: ServicesPlan) -> None:
    _check_can_serve(plan.flags, needs_store=not plan.store)
    _checked_settings(plan.model, plan.flags)


def _checked_settings(model: str, flags: Sequence[str]) -> Any:
    """Return the inference service's settings, checked before anything starts."""
    settings = pkgutil.resolve_name(_INFERENCE_SETTINGS)  # by name, because this package knows neither service
    arguments = ["--model", model, f"--store={LOOPBACK}:1", *flags, f"--listen={LOOPBACK}:0"]
    try:
        read: Any = read_settings(settings, f"python -m {_INFERENCE}", arguments)
        read.check_folders()
    except BadSettingsError as error:
        raise WrongCommandLineError(str(error).strip()) from None
    if read.tls_cert is not None:  # otherwise its health is asked for in plain text, for ever
        raise WrongCommandLineError(
            "these services are without TLS. Leave out --tls-cert, --tls-key and --tls-client-ca, also as RESIDUUM_ "
            "variables and in a settings file. To serve with TLS, start the services separately: "
            "python -m store_svc, python -m inference_svc"
        )
    return read


def _store_tokens(settings: Any) -> list[str]:
    """Return the flags with which the store requires the same tokens as the inference service.

    Otherwise every caller could read the captures of all tenants at the store, and a tenant would not find its own.
    """
    if settings.tokens is None:
        return []
    if settings.store_token_file is None:
        raise WrongCommandLineError(
            "--tokens needs --store-token-file, because the store requires tokens, too. Make a token for it: "
            "residuum token --tenant '*' --rights write --append TOKENS > store.token"
        )
    return [f"--tokens={settings.tokens.absolute()}"]


def _check_can_serve(flags: Sequence[str], *, needs_store: bool) -> None:
    for flag in flags:
        if flag.partition("=")[0] in _OURS:
            raise WrongCommandLineError(
                f"`residuum serve` sets {flag.partition('=')[0]} itself. To choose it, start the services separately: "
                "python -m store_svc, python -m inference_svc"
            )
    missing = [name for name in _NEEDED if (needs_store or name != "lmdb") and importlib.util.find_spec(name) is None]
    if missing:
        raise ServiceFailedError(f"{' and '.join(missing)} cannot be imported: {install_server()}")


class ProgressLine:
    """Shows which service is starting, and for how long. It rewrites one line, or prints a plain line now and then."""

    def __init__(self, stream: TextIO, *, shown: bool) -> None:
        self._stream = stream
        self._shown = shown
        self._live = stream.isatty() or "ipykernel" in sys.modules  # notebooks understand \r, too
        self._last: tuple[str, int] | None = None

    def show(self, service: str, seconds: float) -> None:
        """Show for how long a service has been starting."""
        step = int(seconds) // (1 if self._live else _PLAIN_SECONDS)
        if not self._shown or (service, step) == self._last:
            return
        self._last = (service, step)
        what = "loading the model" if service == "inference" else f"starting the {service}"
        text = f"{what} ... {seconds:.0f} s"
        self._stream.write(f"\r{text:60}" if self._live else f"{text}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear the line. Both services are ready, or one has failed."""
        if self._shown and self._live and self._last:
            self._stream.write(f"\r{'':60}\r")
            self._stream.flush()
