"""Starts and stops the store service."""

from __future__ import annotations

import importlib.metadata
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health

from residuum.rpc.channels import SERVER_OPTIONS
from residuum.rpc.objects import ArchiveRefusedError, Objects
from residuum.rpc.tracing import TracingError, is_on, start_tracing
from residuum.v1 import capture_pb2
from store_svc.archive.archive import Archive
from store_svc.archive.records import check_restored
from store_svc.calls import SHORT_CALLS, Calls
from store_svc.captures.catalog import CatalogLimits
from store_svc.captures.catalog_loading import load_catalog
from store_svc.captures.leases import Leases
from store_svc.captures.lifecycle import Capture, Wait
from store_svc.database.db import DamagedError, Database, StoreFullError, Table, Txn
from store_svc.metrics import StoreCollector, StoreMetrics
from store_svc.searching.search import MAX_THREADS
from store_svc.servicer import SERVICE, StoreServicer
from store_svc.settings import StoreSettings
from store_svc.shared_memory.listener import Listener
from store_svc.shutdown import Shutdown
from store_svc.traces import CaptureTraces
from store_svc.writing.retention import RetentionPolicy
from store_svc.writing.writer import Writer, WriterOptions
from svc_common.logs import configure_logs, get_logger
from svc_common.memory import keep_memory
from svc_common.priority import give_way
from svc_common.rpc.metrics import MetricsListener
from svc_common.rpc.serving import NOT_SERVING, SERVING, ErrorInterceptor, add_health_and_reflection, write_port_file
from svc_common.rpc.stall_timeouts import StallInterceptor
from svc_common.rpc.tracing import TracingInterceptor
from svc_common.security.access import Access
from svc_common.security.authentication import AccessInterceptor
from svc_common.security.tls import add_port
from svc_common.settings import load_settings, log_unknown_variables

_RESTORE_HELP = (
    "If the database was lost, `python -m store_svc restore` makes it again from\nthe archive. It takes the same flags."
)
_FLUSH_SECONDS = 0.5
"""Time for the last answers to be sent once no call runs. Open health watches would use up the whole grace period."""

_log = get_logger(__name__)


class Store:
    """A serving store in this process.

    Example:
        store = Store(settings)   # opens the database and serves
        store.port                # the port that it listens on
        store.stop()              # all acknowledged rows are on disk when it returns
    """

    def __init__(self, settings: StoreSettings, on_death: Callable[[], None] = lambda: None) -> None:
        """Open the database, load the catalog and serve.

        Args:
            settings: The settings.
            on_death: Called in another thread when the writer has failed and the store should be stopped; see `died`.

        Raises:
            DamagedError: The database cannot be used.
            StoreFullError: There is no room to make it, or to repair it after a crash.
            OSError: The address cannot be listened on, or a certificate or tokens file cannot be used.
            ArchiveRefusedError: The archive cannot be used, or is not this store's.
        """
        self._settings = settings
        self.died = False
        """Whether the writer has failed. The process should stop and exit with an error."""
        self._tell_death = on_death
        self._stopped = False
        self._health = health.HealthServicer()
        self._access = Access(settings.tokens, [SERVICE])
        synced = settings.ack == "synced"
        readers = 2 * (settings.max_streams + SHORT_CALLS + MAX_THREADS)  # a thread may have two transactions
        self._db = Database(
            settings.path, settings.max_bytes, sync_roots=synced, max_readers=readers, shards=settings.num_shards
        )
        if settings.shards not in (None, self._db.num_shards):
            _log.warning(
                "the database keeps the number of shards that it was made with; --shards is for new databases",
                shards=self._db.num_shards,
                setting=settings.shards,
            )
        with self._db.read() as txn:
            check_restored(txn)
        limits = CatalogLimits(settings.max_captures, settings.max_open_mib << 20)
        leases = Leases(settings.lease_seconds, limits_of=self._access.limits_of)
        self._catalog = load_catalog(self._db, limits, leases, has_archive=bool(settings.archive))
        retention = _retention(settings)
        options = WriterOptions(
            synced,
            settings.sync_interval_seconds,
            _waits(settings),
            settings.full_timeout_seconds,
            retention,
            self._access.limits_of,
        )
        self._metrics = StoreMetrics()
        self._traces = CaptureTraces()
        self._writer = Writer(
            self._db,
            self._catalog,
            options,
            self._on_death,
            on_commit=self._metrics.commit_seconds.observe,
            on_end=self._on_end,
        )
        store_id = self._db.write(_store_id)
        self._archive = self._open_archive(store_id)
        calls = Calls(settings.max_streams, settings.max_writers, self._access.limits_of)
        self._shared_memory = self._share_memory()
        self._metrics.registry.register(
            StoreCollector(self._db, self._catalog, self._writer, calls, retention, self._archive)
        )
        self._servicer = StoreServicer(
            self._db,
            self._catalog,
            self._writer,
            store_id=store_id,
            version=_version(),
            retention=retention,
            calls=calls,
            metrics=self._metrics,
            limits_of=self._access.limits_of,
            traces=self._traces,
            shared_memory=self._shared_memory,
            archive=self._archive,
        )
        self._stall_interceptor = StallInterceptor(_log, settings.first_message_seconds, settings.stall_seconds)
        self._server = self._make_server()
        self.port = self._listen()
        self._listener = self._show_metrics()
        if self._archive is not None:
            self._archive.start()
        self._writer.start()
        self._server.start()
        self._set_health(SERVING)
        _log.info(
            "serving",
            listen=settings.listen,
            port=self.port,
            path=str(settings.path),
            shared_memory=self._shared_memory.path or "off",
            shards=self._db.num_shards,
            memory_bound_bytes=settings.memory_bound_bytes,
        )

    def stop(self) -> None:
        """Refuse new work, end running calls, write and sync accepted rows, and close. A second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        _log.info("stopping")
        self._health.enter_graceful_shutdown()
        if self._listener:
            self._listener.close()
        self._catalog.stop()
        if self._archive is not None:
            self._archive.stop(self._settings.grace_seconds)
        self._writer.stop()
        self._servicer.end_streams()
        self._server.stop(self._settings.grace_seconds)
        self._servicer.calls.wait_until_idle(self._settings.grace_seconds)
        if self._archive is not None:
            self._archive.end_reads()
        self._server.stop(min(self._settings.grace_seconds, _FLUSH_SECONDS)).wait()
        self._stall_interceptor.close()
        self._servicer.close()
        self._shared_memory.close()
        self._db.close()
        _log.info("stopped")

    def _make_server(self) -> grpc.Server:
        calls = self._settings.max_streams + self._settings.max_writers + SHORT_CALLS
        server = grpc.server(
            ThreadPoolExecutor(calls, thread_name_prefix="call"),
            interceptors=[
                *([TracingInterceptor()] if is_on() else []),
                ErrorInterceptor(_log, self._metrics.calls.note),
                AccessInterceptor(self._access),
                self._stall_interceptor,
            ],
            options=[*SERVER_OPTIONS, ("grpc.max_concurrent_streams", calls)],
            maximum_concurrent_rpcs=calls,
        )
        server.add_generic_rpc_handlers((self._servicer.handler(),))
        add_health_and_reflection(server, SERVICE, self._health)
        return server

    def _share_memory(self) -> Listener:
        try:
            return Listener(self._settings.shared_memory)
        except OSError:
            self._db.close()
            raise

    def _open_archive(self, store_id: bytes) -> Archive | None:
        """Return the archive, after checking it; None without one.

        Raises:
            ArchiveRefusedError: It cannot be used, is not this store's, or is missing although rows are only there.
        """
        settings = self._settings
        try:
            if not settings.archive:
                self._check_rows_are_here()
                return None
            archive = Archive(
                Objects(settings.archive),
                self._db,
                self._catalog,
                self._writer,
                store_id=store_id,
                keep_bytes=settings.archive_keeps,
            )
            archive.check()
        except ArchiveRefusedError:
            self._db.close()
            raise
        return archive

    def _check_rows_are_here(self) -> None:
        moved = self._catalog.archive_states().get(capture_pb2.ARCHIVE_STATE_MOVED, 0)
        if moved:
            raise ArchiveRefusedError(f"the rows of {moved} captures are only in the archive: set --archive")

    def _on_end(self, capture: Capture) -> None:
        self._traces.ended(capture)
        if self._archive is not None:
            self._archive.ended(capture.number)

    def _listen(self) -> int:
        try:
            return add_port(self._server, self._settings)
        except OSError:
            self._shared_memory.close()
            self._db.close()
            raise

    def _show_metrics(self) -> MetricsListener | None:
        if not self._settings.metrics:
            return None
        try:
            listener = MetricsListener(self._settings.metrics, self._metrics.registry)
        except OSError:
            self._shared_memory.close()
            self._db.close()
            raise
        _log.info("metrics", listen=self._settings.metrics, port=listener.port)
        return listener

    def _set_health(self, status: int) -> None:
        for name in ("", SERVICE):
            self._health.set(name, status)

    def _on_death(self) -> None:
        self.died = True
        self._set_health(NOT_SERVING)
        self._catalog.stop()
        self._tell_death()


def main(arguments: Sequence[str]) -> int:
    """Run the store service until SIGTERM or SIGINT; return the exit status."""
    settings = load_settings(StoreSettings, "python -m store_svc", arguments, epilog=_RESTORE_HELP)
    configure_logs(settings.log_level)
    log_unknown_variables(StoreSettings)
    give_way(settings.nice)
    keep_memory()
    shutdown = Shutdown()
    try:
        stop_tracing = start_tracing("residuum-store", settings.otel_endpoint)
        store = Store(settings, shutdown.request)
    except ArchiveRefusedError as error:
        _log.error("cannot start: the archive cannot be used", error=str(error))
        return 1
    except (DamagedError, StoreFullError, OSError, TracingError) as error:
        _log.error("cannot start", error=str(error))
        return 1
    try:
        if settings.port_file:
            write_port_file(Path(settings.port_file), store.port)
        shutdown.wait()
    except OSError as error:
        _log.error("cannot start: the port file cannot be written", error=str(error))
        return 1
    finally:  # otherwise its threads would keep the process alive, and no signal would end it
        store.stop()
        stop_tracing()
    return 1 if store.died else 0


def _waits(settings: StoreSettings) -> dict[Wait, float]:
    return {
        Wait.SEAL: settings.open_timeout_seconds,
        Wait.ROWS: settings.seal_timeout_seconds,
        Wait.REMNANTS: settings.ending_timeout_seconds,
    }


def _retention(settings: StoreSettings) -> RetentionPolicy:
    hours = settings.retain_hours
    return RetentionPolicy(None if hours is None else hours * 3600, settings.retain_bytes)


def _store_id(txn: Txn) -> bytes:
    """Return the store's own ID, creating it in a new database."""
    value = txn.get(Table.META, b"store_id")
    if value is not None:
        return bytes(value)
    made = secrets.token_bytes(16)
    txn.put(Table.META, b"store_id", made)
    return made


def _version() -> str:
    try:
        return importlib.metadata.version("residuum")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # running from a checkout that is not installed
