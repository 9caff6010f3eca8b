"""`python -m inference_svc`: starts the service."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from typing import TYPE_CHECKING, NoReturn

from inference_svc import mp_main
from inference_svc.logs import configure_service_logs
from svc_common.early_end import end_at_sigterm, end_with_starter
from svc_common.logs import get_logger, quiet_grpc
from svc_common.memory import importing
from svc_common.scratch_folder import PREFIX, own_folder, remove_abandoned_folders

if TYPE_CHECKING:
    from inference_svc.settings import InferenceSettings

_PROGRAM = "python -m inference_svc"


def main() -> None:
    """Read the settings and serve until a signal stops the service. The exit code is 1 if the service failed."""
    end_at_sigterm()
    end_with_starter()
    quiet_grpc()
    from inference_svc.settings import InferenceSettings  # they import grpc
    from svc_common.settings import load_settings, log_unknown_variables

    settings = load_settings(InferenceSettings, _PROGRAM, sys.argv[1:])
    remove_abandoned_folders()
    # Only this user can read the folder: it holds the control sockets of the rings.
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        own_folder(folder)
        configure_service_logs(folder, settings.log_level)
        log_unknown_variables(InferenceSettings)
        status = _serve(settings, folder)
    _end(status)


def _serve(settings: InferenceSettings, folder: str) -> int:
    # Imported late: a bad flag is reported at once, --help needs no vLLM, and vLLM finds its logs configured.
    with importing():
        import uvloop

        from inference_svc.server import InferenceServer

    async def serve() -> None:
        await InferenceServer(settings, folder).run()

    try:
        uvloop.run(serve())
    except SystemExit as stop:  # with the reason
        sys.stderr.write(f"{stop}\n")
        return 1
    except Exception as error:  # noqa: BLE001 - vLLM raises what it likes when it cannot serve a model
        get_logger("inference_svc").exception("the service has failed", cause=str(error), kind=type(error).__name__)
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End the process, but let the system free its memory.

    If Python frees all modules, Triton prints 30 lines about objects that are left, below the reason of a failure.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - what Python does first when a process ends
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    # A process that vLLM spawns first runs the module that its parent's __spec__ names. It would skip __main__.
    __spec__ = mp_main.__spec__
    main()
