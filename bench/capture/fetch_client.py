"""A user's client: fetches captures through the thin client into arrays, in a process of its own.

`python -m bench.capture.fetch_client THREADS STORE...`, started by `sinks.Fetcher`: it answers each line of JSON on its
standard input, {"fetch": capture ids}, with one on its standard output once it holds every row, and lets go of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import residuum
from bench.processes import answer_lines


def fetch(client: residuum.Client, pool: ThreadPoolExecutor, capture_ids: Sequence[str]) -> dict[str, Any]:
    """Hold the rows of all captures at once; tell how many they are, or what was wrong."""
    try:
        held = list(pool.map(client.activations, capture_ids))
    except residuum.ResiduumError as error:
        return {"error": str(error)}
    values = [block.values for acts in held for block in acts.blocks().values()]
    return {
        "rows": sum(array.shape[0] * array.shape[1] for array in values),
        "num_bytes": sum(array.nbytes for array in values),
    }


def main() -> None:
    """Answer until the input ends: then whoever asked has gone."""
    threads, *stores = sys.argv[1:]
    nowhere = stores[0].rpartition("=")[2]  # the inference service is asked nothing
    with residuum.Client(nowhere, store=stores) as client, ThreadPoolExecutor(int(threads)) as pool:
        answer_lines({}, lambda request: fetch(client, pool, request["fetch"]))


if __name__ == "__main__":
    main()
