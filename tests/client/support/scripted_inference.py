"""The scripted inference service as a program with the real one's flags: `residuum serve` starts it in the tests."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from svc_common.early_end import end_with_starter
from tests.client.support.peer import RunningPeer

NEVER = "never"
"""The model that loads for ever."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--store", "--listen", "--port-file", "--max-model-len", "--tokens", "--store-token-file"):
        parser.add_argument(flag)
    parser.add_argument("--grace-seconds")
    parser.add_argument("--insecure", action="store_true")
    options = parser.parse_args()
    told = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    end_with_starter()
    if options.model == NEVER:
        signal.sigwait(told)
        return
    peer = RunningPeer(options.store)
    Path(options.port_file).write_text(peer.endpoint.rpartition(":")[2])
    signal.sigwait(told)
    peer.stop()


if __name__ == "__main__":
    main()
