"""`python -m bench.service.vllm_server stock|taps ARGUMENTS`: `vllm serve`, from either of vLLM's wheels.

`stock` has vLLM's own worker, and `taps` is `residuum vllm-serve`, which this starts also where the command is not
installed.
"""

from __future__ import annotations

import sys

from inference_svc.vllm_serve.command import main, run_vllm_serve

if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "taps":
        sys.exit(main(arguments))
    run_vllm_serve(arguments)
