"""Captures of a store or of an archive as a dataset of Ray Data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Dataset, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from residuum.captures.archive import Archive, is_archive
from residuum.captures.row_stream import RowChoice, check_readable, count_rows, look_up, row_format, stream_rows
from residuum.client import Client
from residuum.exceptions import InvalidRequest
from residuum.exports.arrow import batches_of, row_batch, schema_of, token_texts
from residuum.exports.parts import portable
from residuum.protocol.captures.many import check_choice, check_filter, check_ids, check_some, warn_of_left_out
from residuum.protocol.captures.stores import check_stores
from residuum.protocol.captures.tenants import tenant_of
from residuum.protocol.deadlines import Deadline
from residuum.protocol.requests import RequestLike
from residuum.values.replies.capture_summaries import CaptureSummary
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike, index_list
from residuum.wire.labels import LabelValue

if TYPE_CHECKING:
    from residuum.rpc.credentials import TLS
    from residuum.transport.connection_settings import Token
    from residuum.values.captures.manifest import Manifest

_SMALL_BYTES = 8 << 20
"""The chosen rows of a capture that is read at once, together with others. Larger ones are read piece by piece."""

_SMALL_AT_ONCE = 64
"""Small captures that one call reads."""

_BLOCK_BYTES = 16 << 20
"""The approximate size of a block."""

_TASK_BYTES = 128 << 20
"""The most rows of a task, unless it has one capture."""


def read_captures(
    endpoint: str = "",
    captures: Iterable[RequestLike] | None = None,
    *,
    store: str | Iterable[str] | None = None,
    prefix: str | None = None,
    where: str = "",
    layers: LayersLike | None = None,
    sites: str | Sequence[str] | None = None,
    sequences: int | Iterable[int] | None = None,
    positions: PositionsLike = None,
    labels: Iterable[str] = (),
    allow_partial: bool = False,
    override_num_blocks: int | None = None,
    concurrency: int | None = None,
    timeout: float | None = 30.0,
    tenant: str | None = None,
    token: Token = None,
    tls: TLS | bool | None = None,
    insecure: bool | None = None,
) -> Dataset:
    """Return the rows of many captures as a dataset. Tasks on all nodes read different captures.

    The dataset has one row for each captured row, with the columns of Parquet exports: `capture_id`, `sequence`,
    `site`, `layer`, `position`, `token_id`, `token` and `activation`, a list of float32 or of the captured dtype.
    Missing rows of partial captures are left out. The captures are looked up and checked now, and their rows are read
    when the dataset is used. A task holds one piece of a large capture in memory, or a few small captures.

    Args:
        endpoint: The inference service, host:port; not needed if `store` is given.
        captures: The captures, as IDs or replies. None reads those that `prefix` and `where` select.
        store: The store's address, or the URL of its archive, such as "s3://bucket/prefix"; see `Archive`.
        prefix: The prefix of the captures' IDs; "" means all captures.
        where: A filter on the captures' labels, such as "split = train".
        layers: Only these layers; this and the next three arguments are as for `Client.activations`.
        sites: Only these sites. Their rows must have one width.
        sequences: Only these sequences.
        positions: Only these positions.
        labels: Labels of the captures, each of which becomes a column. It is null where a capture lacks the label.
        allow_partial: Read the present rows of captures that are not complete.
        override_num_blocks: The number of read tasks; None lets Ray Data choose.
        concurrency: The most read tasks at once; None means as many as Ray Data wants.
        timeout: Seconds that a call may take, and that a store may be away; this and the next four arguments are as for
            `Client`. Every worker uses the same credentials.
        tenant: The tenant whose captures are read; None for the token's own, and for the default tenant in an archive.
        token: The bearer token.
        tls: TLS settings. Their files must exist on all nodes.
        insecure: Whether a token may be sent in plain text.

    Raises:
        InvalidRequest: No capture matches, captures lack chosen rows or differ in their width or dtype, or an argument
            is invalid.
        UnknownCapture: A named capture does not exist.
        CaptureNotComplete: A named capture is open; or it is not complete, and partial captures are not allowed.
        Unreachable: The store does not answer.

    Warns:
        LeftOutWarning: Captures that `prefix` and `where` select are not complete, and were left out.

    Example:
        >>> train = residuum.ray.read_captures(store="store:50052", where="split = train", layers=[12], labels=["y"])
        >>> train.select_columns(["activation", "y"]).write_parquet("s3://bucket/train")
    """
    names = None if captures is None else check_ids(captures)
    if names is not None:
        check_choice(names, prefix, where)
    stores = check_stores(store)
    connection: dict[str, Any] = {
        "endpoint": endpoint, "store": stores, "timeout": timeout, "tenant": tenant, "token": token, "tls": tls,
        "insecure": insecure,
    }  # fmt: skip
    choice = RowChoice(
        layers=layers, sites=sites, positions=positions, allow_partial=allow_partial,
        sequences=None if sequences is None else tuple(index_list("sequence", sequences)),
    )  # fmt: skip
    source = _Source(connection, Archive(str(stores), tenant=tenant or "") if is_archive(stores) else None)
    found = _look_up(source, names, check_filter(prefix, where) if names is None else "", where, choice)
    return ray.data.read_datasource(
        CapturesDatasource(source, found, choice, tuple(labels)),
        override_num_blocks=override_num_blocks, concurrency=concurrency,
    )  # fmt: skip


@dataclass(frozen=True)
class _Source:
    """Where captures are read from. It can be sent to other nodes."""

    connection: dict[str, Any] = field(repr=False)  # it has the token
    archive: Archive | None

    def open(self) -> Client | Archive:
        return self.archive or Client(**self.connection)


@dataclass(frozen=True)
class _Found:
    """A capture to read."""

    capture_id: str
    rows: int
    num_bytes: int
    labels: dict[str, LabelValue]
    dtype: np.dtype[Any]
    width: int


def _look_up(source: _Source, names: list[str] | None, prefix: str, where: str, choice: RowChoice) -> list[_Found]:
    """Look up and check all captures."""
    leaves_out = names is None and not choice.allow_partial
    left_out: list[Manifest] = []
    found: list[_Found] = []
    summaries: list[CaptureSummary] = []
    timeout = source.connection["timeout"]
    if names is None:
        with source.open() as client:
            summaries = client._selected(prefix, where, Deadline(timeout))  # noqa: SLF001 - with retries
        source.connection["tenant"] = tenant_of(summaries, source.connection["tenant"])
        names = [summary.capture_id for summary in summaries]
    with source.open() as client:
        for summary in summaries:
            if summary.state == "open":
                client.manifest(summary.capture_id, wait=True if timeout is None else timeout)
        for manifest in look_up(client, check_some(names, prefix, where)):
            if leaves_out and manifest.state != "complete":
                left_out.append(manifest)
                continue
            check_readable(manifest, choice)
            found.append(_found(manifest, choice))
    check_some([item.capture_id for item in found], prefix, where)
    warn_of_left_out(left_out, len(names))
    first = found[0]
    for item in found:
        if (item.dtype, item.width) != (first.dtype, first.width):
            raise InvalidRequest(
                f"The captures {first.capture_id} and {item.capture_id} have different rows: {first.width} × "
                f"{first.dtype} and {item.width} × {item.dtype}. Read them as two datasets.",
                reason="INVALID_FIELD",
            )
    return found


def _found(manifest: Manifest, choice: RowChoice) -> _Found:
    form, rows = row_format(manifest, choice), count_rows(manifest, choice, aligned=False)
    dtype = portable(form.decoded_dtype)
    num_bytes = rows * form.decoded_width * dtype.itemsize
    return _Found(manifest.capture_id, rows, num_bytes, dict(manifest.labels), dtype, form.decoded_width)


class CapturesDatasource(Datasource):  # type: ignore[misc] # Ray has no types
    """Reads captures; see `read_captures`."""

    def __init__(self, source: _Source, found: Sequence[_Found], choice: RowChoice, labels: Sequence[str]) -> None:
        super().__init__()
        self._source = source
        self._found = found
        self._choice = choice
        schema = schema_of(found[0].dtype, found[0].width)
        for name in labels:
            if name in schema.names:
                raise InvalidRequest(
                    f"The label {name!r} has the name of another column. Rename it with Client.label.",
                    reason="INVALID_FIELD",
                )
            schema = schema.append(pa.field(name, _label_type(name, found)))
        self._schema = schema

    def get_name(self) -> str:
        """Return the name that progress bars show."""
        return "Captures"

    def estimate_inmemory_data_size(self) -> int:
        """Return the bytes of all rows."""
        return sum(item.num_bytes for item in self._found)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,  # noqa: ARG002 - Ray's interface
    ) -> list[ReadTask]:
        """Return about `parallelism` tasks, and more if each would have too many rows."""
        target = max(1, min(self.estimate_inmemory_data_size() // max(parallelism, 1), _TASK_BYTES))
        most = -(-len(self._found) // max(parallelism, 1))  # captures with one row each are also spread
        parts: list[list[_Found]] = []
        size = target
        for item in self._found:
            if size >= target or len(parts[-1]) >= most:
                parts.append([])
                size = 0
            parts[-1].append(item)
            size += item.num_bytes
        return [
            ReadTask(
                _Read(self._source, part, self._choice, self._schema),
                BlockMetadata(
                    num_rows=sum(item.rows for item in part), size_bytes=sum(item.num_bytes for item in part),
                    input_files=None, exec_stats=None,
                ),
                schema=self._schema, per_task_row_limit=per_task_row_limit,
            )
            for part in parts
        ]  # fmt: skip


@dataclass(frozen=True)
class _Read:
    """One read task."""

    source: _Source
    captures: Sequence[_Found]
    choice: RowChoice
    schema: Any

    def __call__(self) -> Iterator[Any]:
        """Yield blocks."""
        waiting, size = [], 0
        with self.source.open() as client:
            for batch in self._batches(client):
                waiting.append(batch)
                size += batch.nbytes
                if size >= _BLOCK_BYTES:
                    yield pa.Table.from_batches(waiting, self.schema)
                    waiting, size = [], 0
        if waiting:
            yield pa.Table.from_batches(waiting, self.schema)

    def _batches(self, client: Client | Archive) -> Iterator[Any]:
        small = [item.capture_id for item in self.captures if item.num_bytes <= _SMALL_BYTES]
        labels = {item.capture_id: item.labels for item in self.captures}
        plain = schema_of(self.captures[0].dtype, self.captures[0].width)
        for first in range(0, len(small), _SMALL_AT_ONCE):
            names = small[first : first + _SMALL_AT_ONCE]
            plan = self.choice.plan(names[0])
            for acts in client._read_many(plan, names, None):  # noqa: SLF001 - `activations` keeps all captures
                for batch, _ in batches_of(acts, plain):
                    yield self._labelled(batch, labels[acts.manifest.capture_id])
        for item in self.captures:
            if item.num_bytes > _SMALL_BYTES:
                yield from self._pieces(client, item, plain)

    def _pieces(self, client: Client | Archive, item: _Found, plain: Any) -> Iterator[Any]:
        """Yield the rows of a large capture, of which only one piece is in memory."""
        manifests: list[Manifest] = []
        texts: dict[int, Any] = {}
        for part in stream_rows(client, [item.capture_id], [0], self.choice, 1, manifests.append):
            if part.sequence not in texts:
                texts = {part.sequence: token_texts(manifests[0], part.sequence)}
            batch = row_batch(
                plain, item.capture_id, part.sequence, part.site, part.layer, part.positions, part.token_ids,
                texts[part.sequence], part.rows,
            )  # fmt: skip
            yield self._labelled(batch, item.labels)

    def _labelled(self, batch: Any, labels: dict[str, LabelValue]) -> Any:
        columns = list(batch.columns)
        for column in list(self.schema)[len(columns) :]:
            value = labels.get(column.name)
            columns.append(pa.array([_as(value, column.type)] * batch.num_rows, column.type))
        return pa.record_batch(columns, schema=self.schema)


def _label_type(name: str, found: Iterable[_Found]) -> Any:
    """Return the Arrow type of a label. Values of several kinds become text, as do numbers that no float can hold."""
    values = [item.labels[name] for item in found if name in item.labels]
    kinds = set(map(type, values))
    for kind, arrow in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64())):
        if kinds == {kind} or (kind is float and kinds == {int, float}):
            with contextlib.suppress(pa.ArrowInvalid):
                return pa.array(values, arrow).type
    return pa.string()


def _as(value: LabelValue | None, kind: Any) -> Any:
    return str(value) if value is not None and pa.types.is_string(kind) else value
