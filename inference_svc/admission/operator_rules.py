"""The operator's rules, which apply to the requests of all tenants, or of some.

Callers see the events of these rules, under the name operator:NAME, but neither the probes nor their scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inference_svc.admission.probes import num_products
from inference_svc.admission.rules import STEER, action_name, check_steering_rules
from inference_svc.admission.steering import check_demand, demand_of_steering
from inference_svc.resources.vector_cache import OPERATOR, vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import probe_pb2, rule_pb2, tensor_pb2
from residuum.wire.limits import MAX_PROBE_OUTPUTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.admission.specs import ResolvedSpec, SharedSpec
    from inference_svc.resources.vector_cache import VectorCache


@dataclass(frozen=True, eq=False)
class OperatorRule:
    """A rule of the file, with its probe."""

    rule: rule_pb2.Rule
    probe: probe_pb2.Probe
    vectors: tuple[tensor_pb2.Vector, ...]
    tenants: frozenset[str] | None
    """The tenants that it applies to; None: all."""
    may_opt_out: frozenset[str] | bool
    """The tenants that may opt out of it; True: all."""

    def lets_opt_out(self, tenant: str) -> bool:
        """Tell whether a tenant's requests may opt out of the rule."""
        return self.may_opt_out if isinstance(self.may_opt_out, bool) else tenant in self.may_opt_out


class OperatorRules:
    """The rules of a file, or none."""

    def __init__(self, rules: Sequence[OperatorRule] = ()) -> None:
        """Apply these rules."""
        self._rules = tuple(rules)

    @property
    def actions(self) -> dict[str, str]:
        """The action of each rule, by the rule's name as events have it."""
        return {item.rule.name: action_name(item.rule.action) for item in self._rules}

    def names_for(self, tenant: str) -> list[str]:
        """Return the names of the rules that apply to a tenant's requests."""
        return [item.rule.name for item in self._applying(tenant)]

    def outputs_for(self, tenant: str) -> int:
        """Return how many outputs the probes of a tenant's rules have, each counted once for each place."""
        return sum(num_products(item.probe) for item in self._applying(tenant))

    def added_to(self, spec: ResolvedSpec, tenant: str, vectors: VectorCache, *, opts_out: bool) -> ResolvedSpec:
        """Return a tenant's spec with the rules that apply to it, and make sure that their vectors are in the cache.

        Raises:
            Failure: The request opts out of a rule that it may not opt out of, has too many probes for the rules, may
                change its steering although a rule steers, or there is no room for their vectors.
        """
        applying = self._applying(tenant)
        if opts_out:
            kept = [item.rule.name for item in applying if not item.lets_opt_out(tenant)]
            if kept:
                raise Failure(
                    Reason.ERROR_REASON_PERMISSION_DENIED,
                    f"Your requests may not opt out of the operator's rules {', '.join(kept)}. Leave out "
                    "without_operator_rules, or ask the operator.",
                    right="may_opt_out",
                    method="Generate",
                )
            return spec
        if not applying:
            return spec
        complete = spec.shared.derived(applying, lambda: _with_rules(spec.shared, applying))
        for item in applying:
            for vector in item.vectors:
                if vectors.missing([vector_name(OPERATOR, vector.digest)]):
                    vectors.put(vector, OPERATOR)
        return replace(spec, shared=complete)

    def _applying(self, tenant: str) -> tuple[OperatorRule, ...]:
        return tuple(item for item in self._rules if item.tenants is None or tenant in item.tenants)


def _with_rules(spec: SharedSpec, applying: tuple[OperatorRule, ...]) -> SharedSpec:
    """Return the parts of a spec with rules after its own; see `OperatorRules.added_to`."""
    _check_updatable(spec, [item.rule for item in applying])
    merged = probe_pb2.ProbeSpec()
    if spec.probes is not None:
        merged.CopyFrom(spec.probes)
    for item in applying:
        merged.probes.append(item.probe)
        merged.rules.append(item.rule)
    outputs = sum(map(num_products, merged.probes))
    if outputs > MAX_PROBE_OUTPUTS:
        own = outputs - sum(num_products(item.probe) for item in applying)
        raise Failure(
            Reason.ERROR_REASON_INVALID_FIELD,
            f"The probes have {own} outputs, each counted once for each place that its probe reads. Together with "
            f"those of the operator's rules, a request has at most {MAX_PROBE_OUTPUTS}, so yours may have "
            f"{MAX_PROBE_OUTPUTS - outputs + own}.",
            field="probes.probes",
        )
    check_demand(demand_of_steering(spec.steering, spec.capture, merged))
    complete = replace(spec, probes=merged)
    check_steering_rules(complete)
    return complete


def _check_updatable(spec: SharedSpec, rules: Sequence[rule_pb2.Rule]) -> None:
    """Check that the caller cannot undo the steering of the operator's rules. UpdateSteering replaces all operations.

    Raises:
        Failure: The request is updatable, and a rule steers.
    """
    steering = [rule.name for rule in rules if rule.action == STEER]
    if steering and spec.steering is not None and spec.steering.updatable:
        raise Failure(
            Reason.ERROR_REASON_INVALID_FIELD,
            f"The operator's rules {', '.join(steering)} may steer this request, so you cannot change its steering "
            "while it runs. Leave updatable unset, or ask the operator.",
            field="steering.updatable",
        )
