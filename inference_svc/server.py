"""The life of the inference service: start, serve, and stop without losing a row."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import psutil
from grpc_health.v1 import health

from inference_svc.admission.operator_rules import OperatorRules
from inference_svc.admission.rules_file import RulesFile, RulesFileError
from inference_svc.captures.stores import Stores
from inference_svc.engine.engine import Engine
from inference_svc.metrics import InferenceMetrics, ServiceCollector
from inference_svc.parts import Parts
from inference_svc.selftest import self_test_replicas
from inference_svc.servicer import InferenceServicer
from inference_svc.shipping.metrics import ShippingCollector
from inference_svc.shipping.supervisor import ShipperSupervisor
from residuum.rpc.channels import SERVER_OPTIONS
from residuum.rpc.tracing import TracingError, is_on, start_tracing
from residuum.v1 import capture_pb2, inference_pb2_grpc
from svc_common.logs import get_logger
from svc_common.memory import freeze_heap
from svc_common.rpc.metrics import MetricsListener
from svc_common.rpc.serving import NOT_SERVING, SERVING, AioErrorInterceptor, add_health_and_reflection, write_port_file
from svc_common.rpc.stall_timeouts import AioStallInterceptor
from svc_common.rpc.tracing import AioTracingInterceptor
from svc_common.security.access import Access
from svc_common.security.authentication import AioAccessInterceptor
from svc_common.security.tls import add_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inference_svc.settings import InferenceSettings

_log = get_logger(__name__)

SERVICE = "residuum.v1.InferenceService"

_OTHER_CALLS = 256
"""How many calls besides Generate may run at once. gRPC refuses more."""

_WATCH_SECONDS = 0.5
_SEAL_SECONDS = 10.0
_STOP_SECONDS = 5.0
_CALL_SECONDS = 4.0
_END_SECONDS = 1.0
_KILL_SECONDS = 0.1
_GIVE_UP_SECONDS = 2.0
_POLL_SECONDS = 0.05


class EngineDiedError(RuntimeError):
    """The engine's processes have ended, so the service must end too."""


class InferenceServer:
    """One run of the service."""

    def __init__(self, settings: InferenceSettings, folder: str) -> None:
        """Prepare a run; see `run`.

        Args:
            settings: The service's settings.
            folder: A private folder for the control sockets of the rings; the caller removes it.
        """
        self._settings = settings
        self._folder = folder
        self._servicer = InferenceServicer()
        self._health = health.aio.HealthServicer()
        self._stopping = asyncio.Event()
        self._parts: Parts | None = None
        self._rules: RulesFile | None = None
        self._shippers: ShipperSupervisor | None = None
        self._metrics = InferenceMetrics()
        self._listener: MetricsListener | None = None
        self._stop_tracing: Callable[[], None] = lambda: None

    @property
    def engine(self) -> Engine | None:
        """The engine while the service is SERVING; otherwise None."""
        return self._parts.engine if self._parts is not None and self._servicer.is_serving else None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            EngineDiedError: The engine died.
            SelfTestError: The taps do not work in this engine.
            Exception: Whatever vLLM raises when it cannot serve the model.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        try:
            access = Access(self._settings.tokens, [SERVICE])
            if self._settings.rules_file is not None:
                self._rules = RulesFile(self._settings.rules_file)
            self._stop_tracing = start_tracing("residuum-inference", self._settings.otel_endpoint)
        except (OSError, TracingError) as error:
            raise SystemExit(str(error)) from None
        server = await self._listen(access)
        try:
            if await self._start(access):
                await self._watch_engine()
        finally:
            await self._stop(server)

    async def _listen(self, access: Access) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=[
                *([AioTracingInterceptor()] if is_on() else []),
                AioErrorInterceptor(_log, self._metrics.calls.note),
                AioAccessInterceptor(access),
                AioStallInterceptor(_log, self._settings.first_message_seconds, self._settings.stall_seconds),
            ],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=self._settings.max_requests + _OTHER_CALLS,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._servicer, server)
        add_health_and_reflection(server, SERVICE, self._health)
        await self._set_health(serving=False)
        host, _, _ = self._settings.listen.rpartition(":")
        try:
            if self._settings.metrics:
                self._listener = MetricsListener(self._settings.metrics, self._metrics.registry)
                _log.info("metrics", listen=self._settings.metrics, port=self._listener.port)
        except OSError as error:
            raise SystemExit(str(error)) from None
        try:
            port = add_port(server, self._settings)
        except OSError as error:
            raise SystemExit(str(error)) from None
        await server.start()
        if self._settings.port_file:
            try:
                write_port_file(Path(self._settings.port_file), port)
            except OSError as error:
                await server.stop(None)
                raise SystemExit(f"port-file: it cannot be written: {error}") from None
        _log.info("listening", address=f"{host}:{port}")
        return server

    async def _start(self, access: Access) -> bool:
        """Load the model, run the self-test, and accept calls. Return False if a signal stopped the start."""
        settings = self._settings
        starting = asyncio.create_task(Engine.start(settings, self._folder))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            _log.info("got a signal while the model is loading; the service stops")
            await _give_up(starting)
            return False
        engine = await starting
        try:
            self._parts = self._assemble(engine, access)
        except BaseException:
            engine.shutdown()  # its processes would keep this one alive
            raise
        self._servicer.load(self._parts)
        if settings.store:
            controls = engine.facts.control_paths
            self._shippers = ShipperSupervisor.from_settings(settings, controls, self._folder)
            await self._shippers.start()
            self._metrics.registry.register(ShippingCollector(controls, self._shippers))
        if self._stopping.is_set():
            return False
        await self_test_replicas(engine)
        freeze_heap()
        self._servicer.set_serving(serving=True)
        await self._set_health(serving=True)
        _log.info(
            "serving",
            model=engine.facts.name,
            layers=engine.facts.num_layers,
            sites=[capture_pb2.Site.Name(site) for site in engine.facts.sites],
            model_runner=engine.facts.model_runner,
            folded_norms=engine.facts.folded_norms,
            replicas=engine.facts.data_parallel_size,
            capturing_ranks=len(engine.facts.control_paths),
            stores=[str(store) for store in settings.stores],
            advertised=[store.endpoint for store in settings.advertised_stores],
            capture_pool_bytes=engine.facts.pool_bytes,
            table_bytes=engine.facts.table_bytes,
            ring_bytes=engine.facts.ring_bytes,
        )
        return True

    def _assemble(self, engine: Engine, access: Access) -> Parts:
        settings = self._settings
        stores = Stores.from_settings(settings, settings.advertised_stores) if settings.store else None
        try:
            rules = self._rules.for_model(engine.facts) if self._rules else OperatorRules()
        except RulesFileError as error:
            raise SystemExit(str(error)) from None
        for name, action in rules.actions.items():
            self._metrics.rules.know(name, action)
        parts = Parts.assemble(engine, settings, stores, self._metrics, access.limits_of, rules)
        self._metrics.registry.register(ServiceCollector(parts.registry, parts.vectors, parts.activator, stores))
        return parts

    async def _watch_engine(self) -> None:
        assert self._parts is not None  # noqa: S101 - _start came before
        while not self._stopping.is_set():
            if self._parts.engine.is_dead:
                raise EngineDiedError("The engine has died; the log above says why. Restart the service.")
            try:
                await asyncio.wait_for(self._stopping.wait(), _WATCH_SECONDS)
            except asyncio.TimeoutError:
                continue

    async def _stop(self, server: grpc.aio.Server) -> None:
        """Refuse new calls, let running requests end, deliver their rows and seals, then stop the processes."""
        self._servicer.set_serving(serving=False)
        await self._health.enter_graceful_shutdown()
        if self._parts is not None:
            await self._finish_requests(self._parts)
        await server.stop(_CALL_SECONDS)
        if (parts := self._parts) is not None:
            # gRPC does not wait for the end of what it cancels, such as requests whose callers do not read.
            await _until(lambda: not parts.places.num_taken, _END_SECONDS)
            await self._hand_over(parts)
            parts.engine.shutdown()
        if self._listener:
            self._listener.close()
        await asyncio.to_thread(self._stop_tracing)
        _log.info("stopped")

    async def _hand_over(self, parts: Parts) -> None:
        """Deliver rows, then seals, then what shippers hold. A step that fails does not stop the next one."""
        if parts.stores is None:
            return
        steps: list[tuple[str, Awaitable[object]]] = [("seals", parts.stores.close(_SEAL_SECONDS))]
        if self._shippers:
            steps.append(("shippers", self._shippers.stop(_STOP_SECONDS)))
        if not parts.engine.is_dead:
            steps.insert(0, ("rows", self._drain(parts.engine)))
        for part, step in steps:
            try:
                await step
            except Exception:  # noqa: BLE001 - logged; the next step still runs
                _log.exception("some rows or seals may not have reached the store", part=part)

    async def _drain(self, engine: Engine) -> None:
        if not await engine.drain(_SEAL_SECONDS):
            _log.error("rows are left in the ring: their stores did not acknowledge them in time")

    async def _finish_requests(self, parts: Parts) -> None:
        """Let requests end, also those whose prompt is still being read. Abort those that outlast the grace."""
        places, engine = parts.places, parts.engine
        if places.num_taken and not engine.is_dead:
            _log.info("draining", running=places.num_taken)
        if not await _until(lambda: not places.num_taken or engine.is_dead, self._settings.grace_seconds):
            for running in parts.registry.running:
                running.abort()

    async def _set_health(self, *, serving: bool) -> None:
        status = SERVING if serving else NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)


async def _until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, at most this long, and return whether it does."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


async def _give_up(starting: asyncio.Task[Engine]) -> None:
    """Kill the processes of an engine that is starting. There is nothing to lose yet, and a load may take minutes.

    Its thread cannot be killed. If it still asks the model's hub after 2 seconds, it ends with the service.
    """
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while not starting.done() and time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.wait({starting}, timeout=_KILL_SECONDS)
    if starting.done() and starting.exception() is None:
        starting.result().shutdown()
