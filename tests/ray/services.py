"""A store with an archive and two inference services on a tiny model, for tests in Ray's own environment.

It runs in the environment of the services. It prints their addresses as one line of JSON, and stops them when its input
ends.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from residuum.serving import flags_of
from svc_common.launcher import Service, start_inference, start_store
from tests import one_process, warm_start
from tests.reference.tiny import make_tiny_llama

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "enforce_eager": True, "max_model_len": 128, "kv_cache_gib": 0.25, "ring_mib": 32,
    "engine_args": one_process.ENGINE_ARGS,
}  # fmt: skip


def main(folder: Path) -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "fetch_model.py")], check=True, capture_output=True, text=True
    )
    model = make_tiny_llama(folder / "tiny-llama", Path(made.stdout.strip().splitlines()[-1]))
    started: list[Service] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the services end, too
    try:
        started.append(store := start_store(folder / "store", ["--archive", f"file://{folder}/archive"]))
        store.wait_until_serving(60)
        flags = flags_of(SETTINGS)
        started.extend(
            start_inference(folder / name, str(model), store.endpoint, flags, launch=warm_start.launch) for name in "ab"
        )
        for service in started[1:]:
            service.wait_until_serving(400)
        print(
            json.dumps(
                {
                    "model": str(model),
                    "settings": SETTINGS,
                    "store": store.endpoint,
                    "archive": f"file://{folder}/archive",
                    "inference": [service.endpoint for service in started[1:]],
                    "pids": [service.process.pid for service in started[1:]],
                }
            ),
            flush=True,
        )
        sys.stdin.read()
    finally:
        for service in reversed(started):
            service.kill_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
