"""All known environment variables whose names begin with RESIDUUM_. They help to find misspelled variables.

An environment may be shared: it can hold settings of either service, and variables that clients, compose.yaml or the
tests read. This module lists them all. tests/packaging/test_environment.py searches the tree for unlisted ones.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

PREFIX = "RESIDUUM_"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SETTINGS = _names("""
    ACK ADVERTISE_STORE ARCHIVE ARCHIVE_KEEP_BYTES CAPTURE_ENCODING CAPTURE_RP_K CAPTURE_SITES CAPTURE_TOPK_K DTYPE
    ENDING_TIMEOUT_SECONDS ENFORCE_EAGER ENGINE_ARGS FIRST_MESSAGE_SECONDS FIXED_STORES FOLD_NORMS
    FULL_TIMEOUT_SECONDS GRACE_SECONDS INSECURE KV_CACHE_GIB LEASE_SECONDS LISTEN LOG_LEVEL LORA_MODULES
    MAX_ACTIVE_VECTORS MAX_BYTES MAX_CAPTURES MAX_MODEL_LEN MAX_NUM_BATCHED_TOKENS MAX_NUM_SEQS MAX_OPEN_MIB
    MAX_REGISTRATIONS MAX_REGISTRATION_MIB MAX_REQUESTS MAX_STREAMS MAX_VECTORS MAX_VECTOR_MIB MAX_WRITERS METRICS
    MODEL NICE OPEN_TIMEOUT_SECONDS OTEL_ENDPOINT PATH PIPELINE_PARALLEL_SIZE PORT_FILE PUBLISHED_ON
    REGISTRATION_SECONDS RETAIN_BYTES RETAIN_HOURS RING_MIB RULES_FILE SAE_MIB SCORE_MIB SEAL_TIMEOUT_SECONDS SEED
    SERVED_MODEL_NAME SHARDS SHARED_MEMORY SHIPPERS SHIPPER_NICE STALL_SECONDS STORE STORE_TLS STORE_TLS_CA
    STORE_TLS_CERT STORE_TLS_KEY STORE_TLS_SERVER_NAME STORE_TOKEN_FILE SYNC_INTERVAL_SECONDS TENSOR_PARALLEL_SIZE
    TLS_CERT TLS_CLIENT_CA TLS_KEY TOKENS VECTOR_WAIT_SECONDS
""")
"""The settings of both services, without the prefix. A service may see the other's, and neither imports the other."""

OTHERS = (
    # clients, in Python and in examples/languages
    _names("CLIENT_CERT CLIENT_KEY ENDPOINT TLS TLS_CA TLS_SERVER_NAME TOKEN TOKEN_FILE")
    # the services: their configuration file, what started them, and an inference service's settings for its workers
    | _names("CONFIG STARTER_PID WORKER_SETTINGS")
    # compose.yaml and deploy/, which insert them into what they start
    | _names("""
        BIND BIND_INSECURE FIGURES_KEPT GPUS GPU_KV_CACHE_GIB GPU_MEMORY GPU_MODEL GPU_PORT GPU_RING_MIB GPU_SHIPPERS
        GRAFANA_PASSWORD GRAFANA_PORT HOST INFERENCE_MEMORY INFERENCE_PORT PROMETHEUS_PORT SHARDED_PORT STORE_A_PORT
        STORE_B_PORT STORE_MEMORY STORE_PORT TLS_DIR VLLM_TAG
    """)
    # scripts, benchmarks and tests
    | _names("CACHE CONTAINER_ENGINE REVISION TEST_JOURNAL TEST_KERNELS TEST_LANGUAGES TEST_S3 TEST_TIMES")
)
"""Variables that are not settings, but are read by other parts of this project."""

_SERVICE_LINK = re.compile(
    r"(?P<service>\w+?)_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in every pod for each service in its namespace. They begin with the service's name."""


def unknown_variables(own: Collection[str]) -> dict[str, list[str]]:
    """Return the RESIDUUM_ variables in the environment that nothing in this project reads.

    Args:
        own: The names of the calling service's settings.

    Returns:
        A map from each unknown variable to the variables that were probably meant. The list is empty unless the
        variable is close to a setting of `own`.
    """
    mine = {name.upper() for name in own}
    known = mine | SETTINGS
    present = {name.upper(): name for name in sorted(os.environ)}  # settings are also read in lower case
    found = {}
    for upper, name in present.items():
        short = upper.removeprefix(PREFIX)
        if short == upper or short in known | OTHERS or _is_service_link(upper, present):
            continue
        is_close = bool(difflib.get_close_matches(short, mine, n=1))
        meant = difflib.get_close_matches(short, sorted(known), n=2) if is_close else []
        found[name] = [PREFIX + other for other in meant]
    return found


def _is_service_link(name: str, names: Collection[str]) -> bool:
    link = _SERVICE_LINK.fullmatch(name)
    return link is not None and f"{link['service']}_SERVICE_HOST" in names
