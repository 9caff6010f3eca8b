"""Starts a worker of vLLM in several environments, and prints why each did not start, or null.

Its argument is a list of environment variables for each. A fork of a process that has imported vLLM runs this.
"""

from __future__ import annotations

import json
import os
import sys

from vllm.plugins import load_general_plugins

from inference_svc.taps.errors import UnsupportedEngineError
from inference_svc.vllm_serve import worker


def start() -> str | None:
    """Return why a worker does not start in this process."""
    load_general_plugins()
    try:
        worker._check_front_end()
    except UnsupportedEngineError as error:
        return str(error)
    return None


def main() -> None:
    """Start each in a fork: a process loads plugins once."""
    answers = []
    for environment in json.loads(sys.argv[1]):
        reading, writing = os.pipe()
        if not os.fork():
            os.environ.update(environment)
            os.write(writing, json.dumps(start()).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            answers.append(json.load(answer))
        os.wait()
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
