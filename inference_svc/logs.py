"""The logs of all of this service's processes in one form: its own, vLLM's engine and vLLM's workers."""

from __future__ import annotations

import json
import os
from pathlib import Path

from svc_common.logs import configure_logs

LEVEL_VARIABLE = "RESIDUUM_LOG_LEVEL"


def configure_service_logs(folder: str, level: str) -> None:
    """Set up this process's logs, and those of the processes that vLLM will start. Must come before vLLM is imported.

    Args:
        folder: Where the configuration that vLLM reads in each of its processes is written.
        level: The least level that is logged: "debug", "info", "warning" or "error".
    """
    configure_logs(level)
    os.environ[LEVEL_VARIABLE] = level
    path = Path(folder, "vllm-logging.json")
    path.write_text(json.dumps(_vllm_configuration(level.upper())))
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)


def configure_worker_logs() -> None:
    """Set up the logs of our own code in a vLLM worker, as the service asked."""
    configure_logs(os.environ.get(LEVEL_VARIABLE, "info"))


def _vllm_configuration(level: str) -> dict[str, object]:
    """Return a `logging.config.dictConfig` by which vLLM's records look like ours."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"residuum": {"()": "svc_common.logs.make_formatter"}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "residuum", "stream": "ext://sys.stderr"}
        },
        "loggers": {"vllm": {"handlers": ["stderr"], "level": level, "propagate": False}},
    }
