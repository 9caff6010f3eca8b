"""The parts of the inference service that answer its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_svc.engine.unembedding import Unembedding
from inference_svc.request_parts import RequestParts
from inference_svc.requests.concurrency import Places
from inference_svc.requests.registry import RequestRegistry
from inference_svc.session.request_runner import RequestRunner
from residuum.wire.ids import make_id
from svc_common.security.tokens_file import Limits, no_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference_svc.admission.admission import Admission
    from inference_svc.admission.operator_rules import OperatorRules
    from inference_svc.captures.stores import Stores
    from inference_svc.engine.engine import Engine
    from inference_svc.metrics import InferenceMetrics
    from inference_svc.resources.sae_memory import SAEMemory
    from inference_svc.resources.vector_activator import VectorActivator
    from inference_svc.resources.vector_cache import VectorCache
    from inference_svc.settings import InferenceSettings


@dataclass(frozen=True)
class Parts:
    """The parts that the calls need. They exist once the engine runs."""

    engine: Engine
    registry: RequestRegistry
    vectors: VectorCache
    saes: SAEMemory
    activator: VectorActivator
    admission: Admission
    places: Places
    runner: RequestRunner
    unembedding: Unembedding
    stores: Stores | None
    settings: InferenceSettings
    limits_of: Callable[[str], Limits]
    """Returns the limits of a tenant."""
    metrics: InferenceMetrics | None

    @classmethod
    def assemble(
        cls,
        engine: Engine,
        settings: InferenceSettings,
        stores: Stores | None = None,
        metrics: InferenceMetrics | None = None,
        limits_of: Callable[[str], Limits] = no_limits,
        rules: OperatorRules | None = None,
    ) -> Parts:
        """Create the parts around an engine.

        Args:
            engine: The engine.
            settings: The service's settings.
            stores: Where captures go; None: nothing is captured.
            metrics: Where requests are counted.
            limits_of: Returns the limits of a tenant.
            rules: The operator's rules; None: there are none.
        """
        registry = RequestRegistry(
            settings.registration_seconds,
            settings.max_registrations,
            max_bytes=settings.max_registration_mib << 20,
            make_id=stores.make_id if stores else make_id,
            limits_of=limits_of,
        )
        parts = RequestParts.assemble(engine, registry, settings, rules=rules, limits_of=limits_of)
        places = Places(settings.max_requests, limits_of)
        runner = RequestRunner(engine, registry, parts.admission, parts.reservations, stores, metrics, places)
        return cls(
            engine,
            registry,
            parts.vectors,
            parts.saes,
            parts.activator,
            parts.admission,
            places,
            runner,
            Unembedding(engine, parts.saes, registry),
            stores,
            settings,
            limits_of,
            metrics,
        )
