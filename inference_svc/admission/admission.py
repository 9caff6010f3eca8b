"""All checks of a request in one place. Both entry points use them: gRPC and `vllm serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference_svc.admission.kept_parts import KeptParts
from inference_svc.admission.operator_rules import OperatorRules
from inference_svc.admission.probes import check_scores, products_of
from inference_svc.admission.rules import check_rules, steering_of_rules, with_rules
from inference_svc.admission.sampling import check_capture_size, check_prompt, check_sampling
from inference_svc.admission.specs import ResolvedSpec, SpecResolver, check_skip
from inference_svc.admission.steering import (
    VectorUse,
    check_demand,
    demand_of_steering,
    directions_of,
    distinct_uses,
    resolve_steering,
    uses_of,
)
from inference_svc.resources.vector_cache import vector_name
from residuum.v1 import inference_pb2, probe_pb2, steering_pb2
from svc_common.security.tokens_file import Limits, no_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inference_svc.admission.specs import SharedSpec
    from inference_svc.model_facts import ModelFacts
    from inference_svc.resources.sae_memory import SAEMemory
    from inference_svc.resources.vector_cache import VectorCache


class Admission:
    """Checks requests against the model and the vectors on the server.

    Its only state is what was resolved and checked before. In the cache of vectors, those that a checked request needs
    count as used.
    """

    def __init__(
        self,
        facts: ModelFacts,
        vectors: VectorCache,
        saes: SAEMemory,
        rules: OperatorRules | None = None,
        limits_of: Callable[[str], Limits] = no_limits,
    ) -> None:
        """Check requests.

        Args:
            facts: The facts of the model.
            vectors: The server's vectors.
            saes: The server's encoders.
            rules: The operator's rules; None: there are none.
            limits_of: Returns a tenant's limits. It is called for each request, so changed limits apply at once.
        """
        self._saes = saes
        self._facts = facts
        self._specs = SpecResolver(facts)
        self._sampling = KeptParts(
            lambda data: check_sampling(inference_pb2.SamplingParameters.FromString(data), facts)
        )
        self._vectors = vectors
        self._limits_of = limits_of
        self.operator_rules = rules or OperatorRules()

    def resolve(self, spec: inference_pb2.RequestSpec, tenant: str = "") -> ResolvedSpec:
        """Check a tenant's spec against the model; return it with every default, and the operator's rules.

        Raises:
            Failure: The spec is invalid, or opts out of rules that it may not opt out of.
        """
        resolved, opts_out = self._specs.resolve(spec), spec.probes.without_operator_rules
        return self.operator_rules.added_to(resolved, tenant, self._vectors, opts_out=opts_out)

    def resolve_steering(
        self, steering: steering_pb2.SteeringSpec, tenant: str, running: ResolvedSpec
    ) -> steering_pb2.SteeringSpec:
        """Check a new steering for a running request; return it with every default filled in.

        Args:
            steering: The new steering.
            tenant: The tenant that owns the request.
            running: The spec of the request.

        Raises:
            Failure: The steering is invalid or too large, or a vector is not on the server.
        """
        resolved = resolve_steering(steering, self._facts)
        resolved.ClearField("updatable")  # the running request is updatable, whatever the new steering says
        check_demand(demand_of_steering(resolved, running.capture, running.probes))
        self._check_vectors(tenant, uses_of(resolved, self._facts), directions_of(resolved))
        return resolved

    def check_sampling(self, parameters: inference_pb2.SamplingParameters) -> None:
        """Check each sampling parameter that needs no tokenizer.

        Raises:
            Failure: A parameter is out of range, or not what it must be.
        """
        self._sampling(parameters.SerializeToString())

    def check_prompt(self, token_ids: list[int], parameters: inference_pb2.SamplingParameters) -> None:
        """Check that prompt and reply together fit the model's context.

        Raises:
            Failure: The prompt is empty or too long.
        """
        check_prompt(token_ids, parameters, self._facts)

    def check_request(
        self, spec: ResolvedSpec, tenant: str, prompt_tokens: int, parameters: inference_pb2.SamplingParameters
    ) -> None:
        """Check a resolved spec together with its prompt and the vectors on the server.

        Raises:
            Failure: The capture could be too large, a capture that exists already could not answer the request, or a
                vector or an encoder is not on the server, has no direction, or is not as long as the rows that it is
                for.
        """
        check_skip(spec, parameters)
        check_capture_size(spec.capture, prompt_tokens, parameters)
        check_scores(spec.own_probes, parameters)
        check_rules(spec, prompt_tokens, parameters)
        if spec.capture is not None and spec.shared.sae_digest:
            self._saes.check(tenant, spec.capture, [self._facts.width(site) for site in spec.capture.sites])
        self._check_vectors(tenant, *spec.shared.derived("own vectors", lambda: self._own_vectors(spec.shared)))

    def _own_vectors(self, spec: SharedSpec) -> tuple[Sequence[VectorUse], Sequence[bytes]]:
        """Return the caller's vectors, and those that must have a direction.

        The operator's rules were checked when their file was read, and a tenant's lack of room is not theirs.
        """
        steering, probes = spec.steering or steering_pb2.SteeringSpec(), spec.own_probes or probe_pb2.ProbeSpec()
        facts, width = self._facts, self._facts.hidden_size
        projected = spec.capture.encoding_options.vectors if spec.capture else ()
        uses = [VectorUse(digest, width, "capture.encoding_options.vectors") for digest in projected]
        for index, probe in enumerate(probes.probes):
            field = f"probes.probes[{index}] ({probe.name})"
            uses += [VectorUse(product.digest, width, field) for product in products_of(probe)]
        uses += uses_of(steering, facts)
        for index, rule in enumerate(probes.rules):
            uses += uses_of(rule.steering, facts, f"probes.rules[{index}].steering")
        return distinct_uses(uses), list(directions_of(with_rules(steering, steering_of_rules(probes).operations)))

    def _check_vectors(self, tenant: str, uses: Sequence[VectorUse], directions: Iterable[bytes]) -> None:
        if not uses:
            return
        names = [vector_name(tenant, use.digest) for use in uses]
        widths = {name: use.width for name, use in zip(names, uses, strict=True)}.values()
        self._vectors.check_room(widths, self._limits_of(tenant).max_vector_bytes)
        self._vectors.check_present(names)
        for name, use in zip(names, uses, strict=True):
            self._vectors.check_width(name, use.width, use.field)
        for digest in directions:
            self._vectors.check_direction(vector_name(tenant, digest))
