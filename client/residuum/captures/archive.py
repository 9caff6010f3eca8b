"""Reads captures from the archive of a store, without the store."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, overload

from residuum import exceptions as exc
from residuum.captures.archive_index import ArchiveIndex, Entry, tenant_name
from residuum.captures.archived_chunks import chunks_of
from residuum.exports.job import Export, ExportJob
from residuum.protocol.caller import warn_caller
from residuum.protocol.captures.many import (
    check_choice,
    check_filter,
    check_ids,
    check_some,
    is_many,
    not_found,
    warn_of_left_out,
    warn_of_no_rows,
)
from residuum.protocol.captures.reading import Piece, Reading, ReadPlan, plan_read, warn_if_empty
from residuum.protocol.captures.tenants import check_tenant
from residuum.protocol.deadlines import Deadline, list_request
from residuum.protocol.requests import RequestLike, check_capture_id
from residuum.rpc.extras import install_extra
from residuum.rpc.objects import ArchiveError, MissingObjectError, Objects
from residuum.transport.progress import progress_bar
from residuum.v1 import archive_pb2
from residuum.values.captures.activations import Activations
from residuum.values.captures.manifest import Manifest
from residuum.values.captures.manifest_names import to_datetime
from residuum.values.captures.rows import Rows, RowsBuilder, in_order
from residuum.values.replies.capture_summaries import CaptureSummary
from residuum.values.selections.layers_and_positions import LayersLike, PositionsLike
from residuum.wire.endpoints import ARCHIVE_SCHEMES
from residuum.wire.labels import parse_where, to_dict
from residuum.wire.rows.archive import CAPTURES, LayoutError, age_of, capture_path, unpack_capture

if TYPE_CHECKING:
    from typing_extensions import Self

_Result = TypeVar("_Result")

_THREADS = 16
"""Objects that are read at once."""

_CAPTURES_AT_ONCE = 4
"""Captures whose rows are read at once. The rows of these are in memory."""


def is_archive(address: object) -> bool:
    """Tell whether an address is the URL of an archive, and not that of a store."""
    return isinstance(address, str) and address.startswith(ARCHIVE_SCHEMES)


class Archive:
    """The captures in an archive: an object storage to which a store copies its captures (`store_svc --archive`).

    It needs no service. The program reads the objects itself, so it needs the right to read and list them. A program
    with this right may read the captures of all tenants. An `Archive` has those of one tenant. The methods are those of
    `Client` for captures.

    The archive has no list of IDs, so the first call reads the manifests of all captures. Call `refresh` to find those
    that are copied later.

    Args:
        url: The archive's URL, as the store has it: `s3://bucket/prefix`, `gs://`, `az://` or `file:///folder`.
            Credentials come from the environment, as for the store.
        tenant: The tenant whose captures are read; empty for the default tenant. `tenants` lists those that there are.

    Raises:
        InvalidRequest: It is not the URL of an archive, or the tenant's name is invalid.
        ArchiveUnreachable: The URL cannot be used.
        ImportError: The package obstore is not installed (extra `archive`).

    Example:
        >>> archive = residuum.Archive("s3://bucket/prefix")
        >>> archive.activations("req-1", layers=[12])[12].shape
        (68, 576)
    """

    def __init__(self, url: str, *, tenant: str = "") -> None:
        if not is_archive(url):
            raise exc.InvalidRequest(
                f"{url!r} is not the URL of an archive. It begins with {', '.join(ARCHIVE_SCHEMES)}.",
                reason="INVALID_FIELD",
            )
        if importlib.util.find_spec("obstore") is None:
            raise ImportError(f"To read an archive, the client needs the package obstore: {install_extra('archive')}.")
        if tenant:
            check_tenant(tenant)
        self.url = url
        """The URL."""
        self.tenant = tenant
        """The tenant whose captures are read."""
        self._objects = self._reading(lambda: Objects(url, create=False))
        self._lock = threading.Lock()
        self._known: ArchiveIndex | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep what is known of the captures, so that a copy in another process does not look them up again."""
        return _restored, (self.url, self.tenant, self._known)

    def close(self) -> None:
        """Do nothing. An archive keeps no connection that must be closed."""

    def refresh(self) -> None:
        """Forget which captures there are, so that the next call looks again."""
        self._known = None

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants that have captures in the archive, sorted; "" is the default tenant.

        Raises:
            ArchiveUnreachable: The archive does not answer, or refuses this program.
        """
        return tuple(self._index().tenants)

    def captures(
        self, *, prefix: str = "", states: str | Iterable[str] = (), where: str = ""
    ) -> Iterator[CaptureSummary]:
        """Yield the captures in the archive, newest first; see `Client.captures`.

        Raises:
            InvalidRequest: A state does not exist, or `where` cannot be parsed.
            ArchiveUnreachable: The archive does not answer, or refuses this program.
        """
        list_request(prefix, states, where)  # it checks them
        wanted, conditions = {states} if isinstance(states, str) else set(states), parse_where(where)
        for entry in sorted(self._index().captures.values(), key=lambda entry: entry.age, reverse=True):
            item = entry.summary
            is_chosen = item.capture_id.startswith(prefix) and (not wanted or item.state in wanted)
            if is_chosen and all(condition.holds(item.labels) for condition in conditions):
                yield item

    def manifest(
        self,
        request_id: RequestLike,
        *,
        wait: bool | float = False,  # noqa: ARG002 - as `Client.manifest`
    ) -> Manifest:
        """Return the manifest of a capture.

        Args:
            request_id: The request.
            wait: Has no effect: captures in an archive have ended.

        Raises:
            UnknownCapture: The archive does not have the capture.
            ArchiveUnreachable: The archive does not answer, or refuses this program.
        """
        return Manifest.from_proto(self._capture(check_capture_id(request_id)).manifest)

    @overload
    def activations(  # type: ignore[overload-overlap] # a str is one request, although it is iterable
        self,
        request_id: RequestLike,
        *,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        allow_partial: bool = False,
        progress: bool = False,
    ) -> Activations: ...

    @overload
    def activations(
        self,
        request_id: Iterable[RequestLike],
        *,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        allow_partial: bool = False,
        progress: bool = False,
    ) -> list[Activations]: ...

    def activations(
        self,
        request_id: RequestLike | Iterable[RequestLike],
        *,
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        allow_partial: bool = False,
        progress: bool = False,
    ) -> Activations | list[Activations]:
        """Return the captured rows of one request, or of a list of requests. The arguments are as for `Client`.

        Chunks that have none of the chosen rows are not fetched.

        Raises:
            UnknownCapture: The archive does not have a capture.
            IncompleteCapture: Rows are missing; the exception's manifest says which and why.
            AbortedCapture: The request was aborted.
            DamagedCapture: An object is missing, or does not match its checksum.
            ArchiveUnreachable: The archive does not answer, or refuses this program.

        Warns:
            EmptyCaptureWarning: A request has none of the selected positions.
        """
        many = is_many(request_id)
        names = check_ids(request_id) if is_many(request_id) else [check_capture_id(request_id)]
        if not names:
            return []
        plan = plan_read(
            names[0], layers=layers, sites=sites, sequences=sequences, positions=positions,
            follow=False, allow_partial=allow_partial,
        )  # fmt: skip
        found = []
        with progress_bar(f"reading {len(names)} captures", len(names), enabled=progress) as advance:
            for acts in self._read_many(plan, names, None):
                found.append(acts)
                advance(1)
        for acts in found:
            warn_if_empty(acts)
        return in_order(names, found) if many else found[0]

    def rows(
        self,
        captures: Iterable[RequestLike] | None = None,
        *,
        layer: int,
        site: str = "resid_post",
        prefix: str | None = None,
        where: str = "",
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        allow_partial: bool = False,
    ) -> Rows:
        """Return the rows of one layer of many captures as one array, with the origin of each row; see `Client.rows`.

        Warns:
            LeftOutWarning: Captures that `prefix` and `where` select are not complete, and were left out.
            EmptyCaptureWarning: No capture has any of the selected positions.
        """
        if captures is not None:
            check_choice(captures, prefix, where)
            names = check_ids(captures)
        else:
            start = check_filter(prefix, where)
            names = check_some([item.capture_id for item in self._selected(start, where)], start, where)
        leaves_out = captures is None and not allow_partial
        builder, left_out = RowsBuilder(layer, site), []
        plan = plan_read(
            names[0], layers=layer, sites=site, sequences=sequences, positions=positions,
            follow=False, allow_partial=allow_partial or leaves_out,
        ) if names else None  # fmt: skip
        for acts in self._read_many(plan, names, None) if plan else ():
            if leaves_out and acts.manifest.state != "complete":
                left_out.append(acts.manifest)
            else:
                builder.add(acts)
        warn_of_left_out(left_out, len(names))
        rows = builder.rows()
        if rows.captures and not rows:
            warn_of_no_rows(rows.captures, "the result has 0 rows")
        return rows

    def export(
        self,
        request_id: RequestLike,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002 - as `Client.export`
        layers: LayersLike | None = None,
        sites: str | Sequence[str] | None = None,
        sequences: int | Iterable[int] | None = None,
        positions: PositionsLike = None,
        wait: bool = True,  # noqa: ARG002 - as `Client.export`
        timeout: float | None = None,  # noqa: ARG002 - as `Client.export`
        allow_partial: bool = False,
        overwrite: bool = False,
        progress: bool = False,
    ) -> Export:
        """Write the captured rows of a request to a file. The capture may be larger than memory; see `Client.export`.

        `wait` and `timeout` have no effect: captures in an archive have ended.
        """
        job = ExportJob(path, format, overwrite=overwrite, progress=progress)
        plan = plan_read(
            request_id, layers=layers, sites=sites, sequences=sequences, positions=positions,
            follow=False, allow_partial=allow_partial,
        )  # fmt: skip
        with job.begin() as (place, scratch):
            reading = Reading(plan, allocate=scratch.allocate)
            with progress_bar(f"reading {plan.request.capture_id}", None, enabled=progress, of_bytes=True) as advance:
                for _, count in self._read(reading):
                    advance(count)
                    scratch.touch(count)
            acts = reading.activations()
            warn_if_empty(acts)
            return job.run(acts, place, scratch.touch)

    # What `residuum.torch`, `residuum.ray` and `row_stream` use of either a client or an archive.

    def _follow(self, reading: Reading) -> Iterator[Piece]:
        for pieces, _ in self._read(reading):
            yield from pieces
        reading.manifest()

    def _read_many(
        self,
        plan: ReadPlan,
        capture_ids: Sequence[str],
        timeout: float | None,  # noqa: ARG002 - as `Client._read_many`
    ) -> Iterator[Activations]:
        """Yield the activations of captures in order. A few are read at the same time."""
        index = self._index()
        missing = [self._unknown(name) for name in capture_ids if name not in index.captures]
        if missing:
            raise not_found(missing, len(capture_ids))

        def read(name: str) -> Activations:
            reading = Reading(plan.of(name))
            for _ in self._read(reading):
                pass
            return reading.activations()

        with ThreadPoolExecutor(min(_CAPTURES_AT_ONCE, len(capture_ids))) as pool:
            for first in range(0, len(capture_ids), _CAPTURES_AT_ONCE):
                yield from pool.map(read, capture_ids[first : first + _CAPTURES_AT_ONCE])

    def _selected(
        self,
        prefix: str,
        where: str,
        deadline: Deadline | None = None,  # noqa: ARG002 - as `Client._selected`
    ) -> list[CaptureSummary]:
        found = sorted(self.captures(prefix=prefix, where=where), key=lambda item: item.capture_id)
        if not found and (advice := self._index().advice_if_none()):
            like = f" whose ID starts with {prefix!r}" if prefix else ""
            labelled = f" with labels {where!r}" if where else ""
            raise exc.InvalidRequest(
                f"There is no capture of {tenant_name(self.tenant)}{like}{labelled} in {self.url}. {advice}",
                reason="INVALID_FIELD",
            )
        return found

    def _read(self, reading: Reading) -> Iterator[tuple[list[Piece], int]]:
        """Read a capture, and yield the pieces of each chunk and its bytes."""
        name = reading.request.capture_id
        capture = self._capture(name)
        reading.begin()
        reading.add_manifest(capture.manifest)
        fetch = functools.partial(self._fetch, name)
        for chunk, count in chunks_of(capture, self._index().captures[name].key, reading.request, fetch):
            yield reading.add_chunk(chunk), count
        reading.end()

    def _fetch(self, name: str, path: str, start: int, length: int) -> memoryview:
        try:
            return self._reading(lambda: self._objects.get_range(path, start, length))
        except MissingObjectError as error:
            raise exc.DamagedCapture(
                f"The archive lacks rows of the capture {name}: {error}. If the capture was deleted meanwhile, that is "
                "why. Otherwise, restore the object.",
                metadata={"capture_id": name},
            ) from None

    def _capture(self, name: str) -> archive_pb2.ArchivedCapture:
        """Return a capture's own object."""
        entry = self._index().captures.get(name)
        if entry is None:
            raise self._unknown(name)
        try:
            return self._unpacked(entry.key)
        except MissingObjectError:
            raise self._unknown(name) from None
        except LayoutError as error:
            raise exc.DamagedCapture(
                f"The object of the capture {name} in {self.url} cannot be read: {error}.",
                metadata={"capture_id": name},
            ) from None

    def _unknown(self, name: str) -> exc.UnknownCapture:
        advice, of_tenant = self._index().advice(name), f" of {tenant_name(self.tenant)}"
        return exc.UnknownCapture(
            f"There is no capture {name}{of_tenant if advice or self.tenant else ''} in {self.url}. "
            + (
                advice
                or "It was never copied there, or was deleted. List captures with captures(); if it was copied just "
                "now, call refresh()."
            ),
            reason="UNKNOWN_CAPTURE",
            metadata={"capture_id": name},
        )

    def _index(self) -> ArchiveIndex:
        with self._lock:
            if self._known is None:
                self._known = self._load()
            return self._known

    def _load(self) -> ArchiveIndex:
        """Read the manifests of all captures."""
        paths = self._reading(lambda: list(self._objects.list(CAPTURES)))
        index = ArchiveIndex(self.tenant)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="archive") as pool:
            for entry in pool.map(self._entry, [path.removeprefix(f"{CAPTURES}/") for path in paths]):
                if isinstance(entry, Entry):
                    index.add(entry)
                elif entry:
                    warn_caller(entry, exc.LeftOutWarning)
        return index

    def _entry(self, key: str) -> Entry | str | None:
        """Return a capture; a text that says why it cannot be read; None if it was deleted after it was listed."""
        try:
            capture = self._unpacked(key)
            return Entry(key, age_of(key, capture.manifest), _summary(capture))
        except MissingObjectError:
            return None
        except (LayoutError, ValueError) as error:
            return f"The object {key} in {self.url} was left out, because it cannot be read: {error}."

    def _unpacked(self, key: str) -> archive_pb2.ArchivedCapture:
        return unpack_capture(self._reading(lambda: self._objects.get(capture_path(key))))

    def _reading(self, operation: Callable[[], _Result]) -> _Result:
        """Run an operation on the archive.

        Raises:
            MissingObjectError: The object does not exist.
            ArchiveUnreachable: It failed.
        """
        try:
            return operation()
        except MissingObjectError:
            raise
        except ArchiveError as error:
            raise exc.ArchiveUnreachable(
                f"The archive {self.url} cannot be read: {error}. Check the URL, the credentials in the environment, "
                "and whether you may read and list its objects.",
                reason="ARCHIVE_UNREACHABLE",
            ) from None


def _restored(url: str, tenant: str, known: ArchiveIndex | None) -> Archive:
    archive = Archive(url, tenant=tenant)
    archive._known = known  # noqa: SLF001 - the same module
    return archive


def _summary(capture: archive_pb2.ArchivedCapture) -> CaptureSummary:
    manifest = capture.manifest
    view = Manifest.from_proto(manifest)
    return CaptureSummary(
        capture_id=view.capture_id,
        model=view.model,
        state=view.state,
        num_rows=sum(len(rows.layers) * sum(last - first + 1 for first, last in rows.ranges) for rows in view.present),
        num_bytes=sum(chunk.num_bytes for chunk in capture.chunks),
        open_time=to_datetime(manifest.open_time),
        end_time=to_datetime(manifest.end_time),
        tenant=manifest.description.tenant,
        labels=to_dict(manifest.labels),
        archive_state="copied",
    )
