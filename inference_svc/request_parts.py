"""The parts that check requests and reserve what they need. Both entry points use them: gRPC and `vllm serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_svc.admission.admission import Admission
from inference_svc.resources.projections import Projections
from inference_svc.resources.sae_memory import SAEMemory
from inference_svc.resources.vector_activator import VectorActivator
from inference_svc.resources.vector_cache import BY_PUT_VECTORS, VectorCache
from inference_svc.session.reservation import Reservations
from inference_svc.taps.encodings.projections import KEPT_BYTES
from svc_common.security.tokens_file import Limits, no_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inference_svc.admission.operator_rules import OperatorRules
    from inference_svc.engine.engine import Engine
    from inference_svc.requests.registry import RequestRegistry
    from inference_svc.tap_settings import TapSettings
    from inference_svc.taps.encodings.projections import Projection


@dataclass(frozen=True)
class Share:
    """One of several processes that serve the same engine. Each uses its own part of what the workers have room for."""

    index: int
    count: int


WHOLE = Share(0, 1)
"""The share of the only process."""


@dataclass(frozen=True)
class RequestParts:
    """The parts around one engine and one registry."""

    vectors: VectorCache
    saes: SAEMemory
    activator: VectorActivator
    admission: Admission
    reservations: Reservations

    @classmethod
    def assemble(
        cls,
        engine: Engine,
        registry: RequestRegistry,
        settings: TapSettings,
        how_to_send: str = BY_PUT_VECTORS,
        share: Share = WHOLE,
        rules: OperatorRules | None = None,
        limits_of: Callable[[str], Limits] = no_limits,
    ) -> RequestParts:
        """Create the parts.

        Args:
            engine: The engine.
            registry: The requests that the service knows. Vectors that they need stay in the cache.
            settings: The settings of the taps.
            how_to_send: A sentence that tells a client how to send missing vectors.
            share: The share of the workers' resources that these parts may use.
            rules: The operator's rules; None: there are none.
            limits_of: Returns the limits of a tenant.
        """
        facts, wait_seconds = engine.facts, settings.vector_wait_seconds
        max_bytes = settings.max_vector_mib << 20
        vectors = VectorCache(settings.max_vectors, max_bytes, facts.vector_widths, registry.is_leased, how_to_send)
        rows = range(share.index, settings.max_active_vectors, share.count)
        activator = VectorActivator(vectors, rows, engine.load_vectors, wait_seconds)

        async def keep_signs(projections: Sequence[Projection]) -> list[bool | str]:
            return await engine.keep_signs(projections, share.index)

        projections = Projections(keep_signs, facts.hidden_size, wait_seconds, KEPT_BYTES // share.count)
        widths = dict.fromkeys((facts.hidden_size, *map(facts.width, facts.sites)))
        saes = SAEMemory(facts.sae_bytes, list(widths), registry.is_leased, engine.keep_saes)
        admission = Admission(facts, vectors, saes, rules, limits_of)
        return cls(vectors, saes, activator, admission, Reservations(activator, projections))
