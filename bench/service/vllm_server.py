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
    """End this process when its standard input ends, as that of a starter's pipe does even if the starter is killed.

    If this process leads its group, as with `OWN_GROUP`, the group ends with it, and so do vLLM's engines. Otherwise
    the group is the caller's, such as a shell's, and stays.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1 << 16):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_starter()
    kind, *arguments = sys.argv[1:]
    if kind == "taps":
        sys.exit(main(arguments))
    run_vllm_serve(arguments)
