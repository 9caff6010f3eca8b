"""`make serve`: start both services, leave them running, and print how to use them."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console

from examples.model import default_model
from svc_common.launcher import ServiceFailedError, is_free, running_services

USUAL_PORTS = (50052, 50051)
"""Ports of the store and the inference service, as in the documentation. If one is taken, free ports are used."""

_TO_TRY = """\
import residuum
client = residuum.Client("{endpoint}")
print(client.generate("The capital of France is", max_tokens=8).text)"""


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="examples.serve", description=__doc__)
    parser.add_argument("--model", help="the model's folder, or its name on the Hugging Face hub (default: SmolLM2)")
    parser.add_argument(
        "--eager", action="store_true", help="do not compile the model: starts sooner, runs more slowly"
    )
    options = parser.parse_args()
    console = Console(highlight=False)
    console.print("Starting the store and the inference service ...")
    try:
        with running_services(
            options.model or default_model(),
            ports=USUAL_PORTS if all(map(is_free, USUAL_PORTS)) else (0, 0),
            inference_arguments=["--enforce-eager"] if options.eager else [],
        ) as (store, inference):
            console.print(f"store      {store.endpoint}\ninference  {inference.endpoint}\n")
            console.print("Three lines to try in .venv/bin/python:\n")
            console.print(_TO_TRY.format(endpoint=inference.endpoint), markup=False)
            console.print("\nPress Ctrl-C to stop both services and delete the captures.")
            while inference.process.poll() is None and store.process.poll() is None:
                time.sleep(0.5)
            sys.exit("a service stopped unexpectedly")
    except KeyboardInterrupt:
        console.print("stopped")
    except ServiceFailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
