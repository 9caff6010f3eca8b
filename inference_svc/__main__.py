"""`python -m inference_svc`: starts the service."""

from __future__ import annotations

import sys

from inference_svc.settings import InferenceSettings
from residuum.rpc.logs import configure_logs, get_logger
from residuum.rpc.settings import load_settings


def main() -> None:
    """Read the settings, then serve until told to stop. The exit code is not 0 if the service failed."""
    settings = load_settings(InferenceSettings, "python -m inference_svc", sys.argv[1:])
    configure_logs(settings.log_level)
    # After the settings: a bad flag is told at once, and --help needs no vLLM.
    import uvloop

    from inference_svc.selftest import SelfTestError
    from inference_svc.server import EngineDiedError, InferenceServer
    from residuum.rpc.errors import Failure

    async def serve() -> None:
        await InferenceServer(settings).run()

    try:
        uvloop.run(serve())
    except (EngineDiedError, SelfTestError, Failure) as error:
        get_logger("inference_svc").error("the service has failed", cause=str(error), kind=type(error).__name__)
        sys.exit(1)


if __name__ == "__main__":
    main()
