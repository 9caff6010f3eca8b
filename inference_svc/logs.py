"""Log configuration: the service, vLLM's engine and vLLM's workers log in one format."""

from __future__ import annotations

import json
import os
from pathlib import Path

from svc_common.logs import configure_logs

LEVEL_VARIABLE = "RESIDUUM_LOG_LEVEL"


def configure_service_logs(folder: str, level: str) -> None:
    """Configure the logs of this process and of the processes that vLLM starts. Call it before vLLM is imported.

    Args:
        folder: A folder for the configuration file that each process of vLLM reads.
        level: The lowest level that is logged: "debug", "info", "warning" or "error".
    """
    configure_logs(level)
    os.environ[LEVEL_VARIABLE] = level
    path = Path(folder, "vllm-logging.json")
    path.write_text(json.dumps(_vllm_configuration(level.upper())))
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)


def configure_worker_logs() -> None:
    """Configure the logs of residuum's own code in a vLLM worker, at the service's level."""
    configure_logs(os.environ.get(LEVEL_VARIABLE, "info"))


def _vllm_configuration(level: str) -> dict[str, object]:
    """Return a `logging.config.dictConfig` that formats vLLM's records as residuum's."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"residuum": {"()": "svc_common.logs.make_formatter"}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "residuum", "stream": "ext://sys.stderr"}
        },
        "loggers": {"vllm": {"handlers": ["stderr"], "level": level, "propagate": False}},
    }
