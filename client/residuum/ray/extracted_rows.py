"""The rows of prompts as Arrow tables, with a row for each prompt that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from residuum.exceptions import InvalidRequest, ResiduumError
from residuum.exports.parts import portable
from residuum.extraction.running.services import Services
from residuum.extraction.shards import Shard
from residuum.extraction.spec import JobSpec
from residuum.values.selections.points import transformer_lens_name

_NUMBERS = {"token_ids": pa.int32(), "positions": pa.int32(), "sequences": pa.int32()}

Points = dict[str, tuple[np.dtype[Any], int]]
"""The element type and the width of each point."""


class ShardTables:
    """Makes tables of shards. All have one schema, also those in which every prompt failed."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._points: Points = {}

    def of(self, shard: Shard, prompts: Any, probe: Callable[[], Points]) -> Any:
        """Return the table of a shard.

        Args:
            shard: The shard.
            prompts: The prompts of its batch, from which the kept columns are.
            probe: Returns the points, if no prompt has had rows before.
        """
        arrays, lines = shard.arrays(), shard.lines
        with self._lock:
            if not self._points:
                found = {name: (array.dtype, array.shape[1]) for name, array in arrays.items() if array.ndim > 1}
                self._points = found or probe()
            points = self._points
        counts = np.diff(arrays["offsets"])
        failed = np.array(["failed" in line for line in lines], np.bool_)
        repeats = np.where(failed, 1, counts)
        line_of_row = np.repeat(np.arange(len(lines)), repeats)
        is_failure = failed[line_of_row]
        columns: dict[str, Any] = {}
        for name, (dtype, width) in points.items():
            columns[transformer_lens_name(name)] = _lists(arrays.get(name), portable(dtype), width, is_failure)
        for name, kind in _NUMBERS.items():
            values = np.zeros(len(line_of_row), np.int32)
            values[~is_failure] = arrays[name]
            columns[name] = pa.array(values, kind, mask=is_failure)
        columns["prompt_sha256"] = pa.array([line["sha256"] for line in lines], pa.string()).take(line_of_row)
        taken = pa.array(np.array([line["input_row"] for line in lines], np.int64)[line_of_row])
        for name in self._spec.keep:
            columns[name] = prompts.column(name).combine_chunks().take(taken)
        columns["error"] = pa.array([_error(line) for line in lines], pa.string()).take(line_of_row)
        expected = len(points) + len(_NUMBERS) + len(self._spec.keep) + 2
        if len(columns) != expected:
            raise InvalidRequest(
                f"A kept column has the name of another column: {', '.join(self._spec.keep)}. The rows have "
                f"{', '.join(columns)}. Rename it in the input.",
                reason="INVALID_FIELD",
            )
        return pa.table(columns)

    async def probe(self, services: Services) -> Points:
        """Return the points of a prompt of one token, whose rows are read and thrown away.

        Raises:
            ResiduumError: That prompt failed, too.
        """
        spec, client = self._spec, services.all[0].client
        async with services.slot() as service:
            client = service.client
            reply = await client.generate([1], capture=spec.capture, model=spec.model, max_tokens=0)
            try:
                acts = await client.activations(reply, allow_partial=True)
            finally:
                await client.delete(reply)
        if not acts.sites:
            raise ResiduumError("No prompt has rows, so the columns of the table are unknown. Capture other positions.")
        parts = [acts.select(site=site) for site in acts.sites]
        return {f"{part.site}.{layer}": (part.raw(layer).dtype, part.width) for part in parts for layer in part.layers}


def _lists(values: Any, dtype: np.dtype[Any], width: int, is_failure: Any) -> Any:
    """Return rows as lists of one length, and null where a prompt failed."""
    if values is None:
        return pa.nulls(len(is_failure), pa.list_(pa.from_numpy_dtype(dtype), width))
    if not is_failure.any():
        return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values, dtype).reshape(-1)), width)
    spread = np.zeros((len(is_failure), width), dtype)
    spread[~is_failure] = values
    return pa.FixedSizeListArray.from_arrays(pa.array(spread.reshape(-1)), width, mask=pa.array(is_failure))


def _error(line: Mapping[str, Any]) -> str | None:
    failure = line.get("failed")
    return None if failure is None else f"{failure['reason']}: {failure['message']}"
