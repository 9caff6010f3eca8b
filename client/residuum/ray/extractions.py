"""The folder of an extraction as a dataset of Ray Data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.data import Dataset, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from residuum.exceptions import InvalidRequest
from residuum.extraction.results.reader import Extracted
from residuum.extraction.results.tables_out import Layout, Table


def read_extracted(
    folder: str | os.PathLike[str],
    *,
    allow_partial: bool = False,
    override_num_blocks: int | None = None,
    concurrency: int | None = None,
) -> Dataset:
    """Return the rows of an extraction (`Client.extract`) as a dataset, read in parallel.

    The columns are those of `Extracted.export`: one for each point, such as `blocks.12.hook_resid_post`; `token_ids`,
    `positions`, `documents`, `prompt`; and the kept columns. A packed job has one row for each window.

    Args:
        folder: The job's folder, on a disk that all nodes have.
        allow_partial: Read the rows so far of a job that is not complete.
        override_num_blocks: The number of read tasks; None lets Ray Data choose.
        concurrency: The most read tasks at once; None means as many as Ray Data wants.

    Raises:
        FileNotFoundError: There is no job in the folder.
        InvalidRequest: The job is not complete, has no rows, or a kept column has the name of another column.

    Example:
        >>> residuum.ray.read_extracted("/shared/windows").random_shuffle(seed=0)
    """
    rows = Extracted(folder)
    rows.check_complete(allow_partial=allow_partial)
    if not len(rows):
        raise InvalidRequest(f"{rows.folder} has no rows.", reason="INVALID_FIELD")
    return ray.data.read_datasource(
        ExtractedDatasource(rows), override_num_blocks=override_num_blocks, concurrency=concurrency
    )


class ExtractedDatasource(Datasource):  # type: ignore[misc] # Ray has no types
    """Reads the folder of an extraction; see `read_extracted`."""

    def __init__(self, rows: Extracted) -> None:
        super().__init__()
        table = Table(rows)
        self._folder, self._layout, self._schema = rows.folder.absolute(), table.layout, table.schema()
        self._row_bytes = table.row_bytes
        self._shards = [len(rows.shard(number)) // (table.context or 1) for number in range(rows.num_shards)]

    def get_name(self) -> str:
        """Return the name that progress bars show."""
        return "Extracted"

    def estimate_inmemory_data_size(self) -> int:
        """Return the bytes of all rows."""
        return sum(self._shards) * self._row_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,  # noqa: ARG002 - Ray's interface
    ) -> list[ReadTask]:
        """Return `parallelism` tasks, or one for each shard if there are fewer shards."""
        step = max(1, -(-len(self._shards) // max(parallelism, 1)))
        tasks = []
        for first in range(0, len(self._shards), step):
            part = range(first, min(first + step, len(self._shards)))
            rows = sum(self._shards[number] for number in part)
            metadata = BlockMetadata(
                num_rows=rows, size_bytes=rows * self._row_bytes, input_files=None, exec_stats=None
            )
            read = _Read(self._folder, self._layout, part)
            tasks.append(ReadTask(read, metadata, schema=self._schema, per_task_row_limit=per_task_row_limit))
        return tasks


@dataclass(frozen=True)
class _Read:
    """One read task. It maps the files into memory, and reads only its own shards."""

    folder: Path
    layout: Layout
    shards: range

    def __call__(self) -> Iterator[Any]:
        """Yield blocks."""
        for batch in Table(Extracted(self.folder), self.layout).batches(self.shards):
            yield pa.Table.from_batches([batch])
