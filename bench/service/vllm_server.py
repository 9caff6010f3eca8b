"""`python -m bench.service.vllm_server stock|taps ARGUMENTS`: `vllm serve`, from either of vLLM's wheels.

`stock` has vLLM's own worker, and `taps` is `residuum vllm-serve`, which this starts also where the command is not
installed. Its standard input is a pipe from the benchmark, and ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from inference_svc.vllm_serve.command import main, run_vllm_serve


def end_with_starter() -> None:
    """Kill this process group, with vLLM's engines, when standard input ends. It ends also if the starter is killed."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_starter()
    kind, *arguments = sys.argv[1:]
    if kind == "taps":
        sys.exit(main(arguments))
    run_vllm_serve(arguments)
