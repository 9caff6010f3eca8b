"""The rules of a request: their checks, and what their steering needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference_svc.admission.fields import invalid
from inference_svc.admission.sampling import max_new_tokens, num_sequences
from inference_svc.admission.steering import demand_of_steering, digests_of, resolve_steering
from inference_svc.taps.steps.demand import MAX_ENTRIES, MAX_PROGRAMS
from residuum.v1 import rule_pb2, steering_pb2
from residuum.wire.limits import MAX_OPERATIONS, MAX_RULES, MAX_STEERING_CHANGES, MAX_STEERING_CHANGES_BYTES
from residuum.wire.probes.arithmetic import is_valid_probe_name
from residuum.wire.probes.rules import NEVER, problem_of
from residuum.wire.selection import selects_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inference_svc.admission.specs import ResolvedSpec, SharedSpec
    from inference_svc.model_facts import ModelFacts
    from residuum.v1 import inference_pb2, probe_pb2

FLAG, ABORT, STEER = rule_pb2.RULE_ACTION_FLAG, rule_pb2.RULE_ACTION_ABORT, rule_pb2.RULE_ACTION_STEER


def resolve_rules(spec: probe_pb2.ProbeSpec, facts: ModelFacts) -> None:
    """Check the rules of checked probes, and fill in their defaults.

    Raises:
        Failure: A rule is invalid, or can never fire. The reason and the metadata name the field.
    """
    if len(spec.rules) > MAX_RULES:
        raise invalid("probes.rules", f"There are {len(spec.rules)} rules; a request has at most {MAX_RULES}.")
    probes = {probe.name: probe for probe in spec.probes}
    names = [rule.name for rule in spec.rules]
    for index, rule in enumerate(spec.rules):
        field = f"probes.rules[{index}]"
        if not is_valid_probe_name(rule.name):
            raise invalid(f"{field}.name", "A rule's name has 1 to 64 of the characters a-z A-Z 0-9 . _ -.")
        if names.index(rule.name) != index:
            raise invalid(f"{field}.name", f"Two rules are named {rule.name}. Give each a name of its own.")
        if rule.probe not in probes:
            known = f"Its probes are: {', '.join(probes)}." if probes else "It has no probes."
            raise invalid(
                f"{field}.probe",
                f"The rule {rule.name} names the probe {rule.probe[:64]!r}, which the request does not have. {known}",
            )
        if problem := problem_of(rule, probes[rule.probe]):
            raise invalid(field, f"The rule {rule.name} is invalid: {problem}.")
        rule.for_tokens = rule.for_tokens or 1
        _resolve_action(field, rule, facts)


def _resolve_action(field: str, rule: rule_pb2.Rule, facts: ModelFacts) -> None:
    rule.action = rule.action or FLAG
    if rule.action not in (FLAG, ABORT, STEER):
        names = ", ".join(rule_pb2.RuleAction.keys())
        raise invalid(f"{field}.action", f"The action is {int(rule.action)}; this server knows {names}.")
    if (rule.action == STEER) != bool(rule.steering.operations):
        raise invalid(
            f"{field}.steering",
            f"The rule {rule.name} needs operations if its action is RULE_ACTION_STEER, and must have none otherwise.",
        )
    if rule.action == STEER:
        rule.steering.CopyFrom(resolve_steering(rule.steering, facts, f"{field}.steering"))
        rule.steering.ClearField("updatable")
    else:
        rule.ClearField("steering")


def steering_of_rules(spec: probe_pb2.ProbeSpec | None) -> steering_pb2.SteeringSpec:
    """Return the operations of all rules that steer, in their order."""
    rules = spec.rules if spec else ()
    return steering_pb2.SteeringSpec(operations=[item for rule in rules for item in rule.steering.operations])


def rule_digests(spec: probe_pb2.ProbeSpec | None) -> list[bytes]:
    """Return the digests of the vectors that rules steer with."""
    return digests_of(steering_of_rules(spec))


def action_name(action: rule_pb2.RuleAction.ValueType) -> str:
    """Return an action's name in metrics, logs and answers: "flag", "abort" or "steer"."""
    return rule_pb2.RuleAction.Name(action).removeprefix("RULE_ACTION_").lower()


def has_action(spec: probe_pb2.ProbeSpec | None, action: rule_pb2.RuleAction.ValueType) -> bool:
    """Tell whether a rule of a checked spec has an action."""
    return spec is not None and any(rule.action == action for rule in spec.rules)


def with_rules(
    steering: steering_pb2.SteeringSpec | None, rules: Iterable[steering_pb2.SteeringOperation]
) -> steering_pb2.SteeringSpec:
    """Return a steering with further operations after its own."""
    combined = steering_pb2.SteeringSpec(operations=steering.operations if steering else ())
    combined.operations.extend(rules)
    return combined


def check_steering_rules(spec: SharedSpec) -> None:
    """Check that the request has room for the steering of all its rules, in whatever order they fire.

    Raises:
        Failure: There are too many operations.
    """
    steps = _steering_steps(spec)
    if not steps:
        return
    combined = with_rules(spec.steering, steering_of_rules(spec.probes).operations)
    demand = demand_of_steering(combined, spec.capture, spec.probes)
    # A step that computes a request again may need what applied before each rule fired, and after the last one.
    entries = (steps + 1) * demand.entries
    for needed, most, what in (
        (len(combined.operations), MAX_OPERATIONS, "operations"),
        (demand.programs, MAX_PROGRAMS, "different programs"),
        (entries, MAX_ENTRIES, "operations in tables"),
    ):
        if needed > most:
            rules = "its rule" if steps == 1 else f"all its {steps} rules"
            raise invalid(
                "probes.rules",
                f"With the steering of {rules}, the request needs {needed} {what}; there may be at most {most}. Use "
                "fewer rules or operations, or give more operations the same layers and positions.",
            )


def check_rules(spec: ResolvedSpec, prompt_tokens: int, sampling: inference_pb2.SamplingParameters) -> None:
    """Check the rules of a request together with its prompt and its sampling parameters.

    Raises:
        Failure: A rule can never fire, none of its operations could apply, or the steering of all rules would not fit
            the manifest.
    """
    rules: Sequence[rule_pb2.Rule] = spec.own_probes.rules if spec.own_probes else ()  # the operator's may be longer
    new = max_new_tokens(sampling)
    for index, rule in enumerate(rules):
        if rule.for_tokens > new:
            raise invalid(
                f"probes.rules[{index}].for_tokens",
                f"The rule {rule.name} can never fire: its for_tokens is {rule.for_tokens}, and the "
                f"request's max_tokens is {new}. Raise max_tokens, or lower for_tokens.",
            )
        positions = [operation.positions for operation in rule.steering.operations]
        if positions and not any(selects_any(item, prompt_tokens, prompt_tokens, new) for item in positions):
            raise invalid(
                f"probes.rules[{index}].steering",
                f"The steering of the rule {rule.name} would never apply: its operations select no position that this "
                "request can generate. Leave out their positions, or choose others.",
            )
    changes, sequences = _steering_steps(spec) * num_sequences(sampling), num_sequences(sampling)
    if not changes:
        return
    combined = with_rules(spec.steering, steering_of_rules(spec.probes).operations)
    longest = max(len(rule.name) for rule in spec.probes.rules) if spec.probes else 0
    change = steering_pb2.SteeringChange(steering=combined, first_positions=[NEVER] * sequences, rule="x" * longest)
    if changes > MAX_STEERING_CHANGES or changes * change.ByteSize() > MAX_STEERING_CHANGES_BYTES:
        raise invalid(
            "probes.rules",
            f"The rules of this request may change its steering {changes} times ({sequences} sequences) with up to "
            f"{change.ByteSize()} bytes each; a manifest has room for {MAX_STEERING_CHANGES} changes and "
            f"{MAX_STEERING_CHANGES_BYTES >> 10} KiB. Use fewer rules that steer, operations or sequences.",
        )


def _steering_steps(spec: ResolvedSpec | SharedSpec) -> int:
    return sum(rule.action == STEER for rule in spec.probes.rules) if spec.probes else 0
