"""Fetches captures into arrays with residuum's client, in a separate process, like a user's program.

`Fetcher` starts `python -m bench.capture.sinks.fetch_client STORE...`. It reads lines of JSON from standard input,
{"fetch": capture IDs}. It answers each on standard output once it holds every row, and then releases the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import residuum
from bench.processes import answer_lines


def fetch(client: residuum.Client, capture_ids: Sequence[str]) -> dict[str, Any]:
    """Fetch all captures and hold their rows at the same time; return the number of rows, or the error."""
    try:
        held = client.activations(capture_ids)
    except residuum.ResiduumError as error:
        return {"error": str(error)}
    values = [block.values for acts in held for block in acts.blocks().values()]
    return {
        "rows": sum(array.shape[0] * array.shape[1] for array in values),
        "num_bytes": sum(array.nbytes for array in values),
    }


def main() -> None:
    """Answer until standard input ends, which means that the parent process has ended."""
    stores = sys.argv[1:]
    nowhere = stores[0].rpartition("=")[2]  # a placeholder: the client never calls the inference service
    with residuum.Client(nowhere, store=stores) as client:
        answer_lines({}, lambda request: fetch(client, request["fetch"]))


if __name__ == "__main__":
    main()
