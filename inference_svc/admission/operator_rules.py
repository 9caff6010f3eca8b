"""The operator's rules, which apply to the requests of all tenants, or of some: a file that is read at the start.

    [[rule]]
    name = "toxic"
    probe = "toxic.safetensors"      # a file of Probe.save, relative to this file
    above = 0.9                      # or below
    for_tokens = 3                   # default: 1
    output = 0                       # the output of the probe, or its name; default: 0
    then = "abort"                   # or "steer", with operations; or "flag", the default
    tenants = ["alice", "bob"]       # default: all, also those without authentication
    may_opt_out = ["bob"]            # tenants whose requests may opt out of it; true: all; default: none

    [[rule.steer]]                   # the operations of then = "steer": see operator_steering.py
    add = { vector = "calm.npy", scale = 2.0 }
    layers = [12]

Callers see the events of these rules, under the name operator:toxic, but neither the probes nor their scores.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference_svc.admission.operator_steering import check_vectors, load_steering
from inference_svc.admission.probes import resolve_probes
from inference_svc.admission.rules import ABORT, FLAG, STEER, check_steering_rules, resolve_rules
from inference_svc.admission.steering import check_demand, demand_of_steering
from inference_svc.resources.vector_cache import OPERATOR, vector_name
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, probe_pb2, rule_pb2, tensor_pb2
from residuum.wire.digests import vector_message
from residuum.wire.limits import MAX_OPERATOR_RULES, MAX_PROBE_OUTPUTS
from residuum.wire.probe_files import ProbeFile, parse
from residuum.wire.probes import is_valid_probe_name
from residuum.wire.smoothing import from_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference_svc.admission.specs import ResolvedSpec, SharedSpec
    from inference_svc.model_facts import ModelFacts
    from inference_svc.resources.vector_cache import VectorCache

PREFIX = OPERATOR
"""The prefix of the names of the operator's rules and probes. No caller's rule can have it."""


class RulesFileError(OSError):
    """A file of rules cannot be used. The message says why."""


@dataclass(frozen=True, eq=False)
class _OperatorRule:
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

    def __init__(self, rules: Sequence[_OperatorRule] = ()) -> None:
        """Apply these rules."""
        self._rules = tuple(rules)

    @property
    def names(self) -> list[str]:
        """The names of all rules, as events have them."""
        return [item.rule.name for item in self._rules]

    def names_for(self, tenant: str) -> list[str]:
        """Return the names of the rules that apply to a tenant's requests."""
        return [item.rule.name for item in self._applying(tenant)]

    def outputs_for(self, tenant: str) -> int:
        """Return how many outputs the probes of a tenant's rules have."""
        return sum(len(item.probe.outputs) for item in self._applying(tenant))

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

    def _applying(self, tenant: str) -> tuple[_OperatorRule, ...]:
        return tuple(item for item in self._rules if item.tenants is None or tenant in item.tenants)


def _with_rules(spec: SharedSpec, applying: tuple[_OperatorRule, ...]) -> SharedSpec:
    """Return the parts of a spec with rules after its own; see `OperatorRules.added_to`."""
    _check_updatable(spec, [item.rule for item in applying])
    merged = probe_pb2.ProbeSpec()
    if spec.probes is not None:
        merged.CopyFrom(spec.probes)
    for item in applying:
        merged.probes.append(item.probe)
        merged.rules.append(item.rule)
    outputs = sum(len(probe.outputs) for probe in merged.probes)
    if outputs > MAX_PROBE_OUTPUTS:
        own = outputs - sum(len(item.probe.outputs) for item in applying)
        raise Failure(
            Reason.ERROR_REASON_INVALID_FIELD,
            f"The probes have {own} outputs. Together with those of the operator's rules, a request has at most "
            f"{MAX_PROBE_OUTPUTS}, so yours may have {MAX_PROBE_OUTPUTS - outputs + own}.",
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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Rule(_Strict):
    name: str
    probe: str
    above: float | None = None
    below: float | None = None
    for_tokens: int = Field(default=1, ge=1, lt=1 << 32)
    output: Annotated[int, Field(ge=0, lt=1 << 32)] | str = 0
    then: Literal["flag", "abort", "steer"] = "flag"
    steer: tuple[dict[str, Any], ...] = ()
    tenants: frozenset[str] | None = None
    may_opt_out: frozenset[str] | bool = False


class _File(_Strict):
    rule: tuple[_Rule, ...] = ()


def load_rules(path: Path, facts: ModelFacts) -> OperatorRules:
    """Read a file of rules, and check them against the model.

    Raises:
        RulesFileError: The file cannot be used.
    """
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RulesFileError(f"rules: {path} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise RulesFileError(f"rules: {path}: {problems}") from None
    except ValueError as error:
        raise RulesFileError(f"rules: {path} is not TOML: {error}") from None
    twice = [name for name, times in Counter(rule.name for rule in file.rule).items() if times > 1]
    if twice or len(file.rule) > MAX_OPERATOR_RULES:
        problem = f"several rules are named {twice[0]}" if twice else f"there are {len(file.rule)} rules"
        raise RulesFileError(f"rules: {path}: {problem}. At most {MAX_OPERATOR_RULES} rules, each of another name.")
    try:
        rules = [_loaded(rule, path.parent, facts) for rule in file.rule]
    except Failure as failure:
        raise RulesFileError(f"rules: {path}: {failure.message}") from None
    except ValueError as error:
        raise RulesFileError(f"rules: {path}: {error}") from None
    outputs = sum(len(item.probe.outputs) for item in rules)
    if outputs >= MAX_PROBE_OUTPUTS:
        # One is left to callers: a limit of 0 tells them that the server has no probes.
        raise RulesFileError(
            f"rules: {path}: the probes have {outputs} outputs; at most {MAX_PROBE_OUTPUTS - 1} in all, so that "
            "requests can have probes of their own."
        )
    return OperatorRules(rules)


def _loaded(given: _Rule, folder: Path, facts: ModelFacts) -> _OperatorRule:
    """Return a rule with its probe.

    Raises:
        Failure: The rule or the probe does not fit the model.
        ValueError: The file holds no probe, or the rule is invalid.
    """
    if not is_valid_probe_name(given.name):
        raise ValueError(f"a rule's name has 1 to 64 of the characters a-z A-Z 0-9 . _ -, not {given.name!r}")
    if (given.above is None) == (given.below is None):
        raise ValueError(f"the rule {given.name} needs either above or below")
    path = folder / given.probe
    probe, vectors = _load_probe(path)
    probe.name = given.name  # each rule has a probe of its own
    if isinstance(given.output, str) and given.output not in probe.output_names:
        raise ValueError(f"{path}: the probe has no output {given.output!r}; it has {list(probe.output_names)}")
    output = given.output if isinstance(given.output, int) else list(probe.output_names).index(given.output)
    rule = rule_pb2.Rule(name=given.name, probe=given.name, output=output, for_tokens=given.for_tokens)
    rule.action = {"flag": FLAG, "abort": ABORT, "steer": STEER}[given.then]
    if (rule.action == STEER) != bool(given.steer):
        raise ValueError(f"the rule {given.name} needs [[rule.steer]] if then is 'steer', and must have none otherwise")
    steering, steering_vectors = load_steering(given.steer, folder)
    rule.steering.CopyFrom(steering)
    if given.above is not None:
        rule.above = given.above
    if given.below is not None:
        rule.below = given.below
    resolved = resolve_probes(probe_pb2.ProbeSpec(probes=[probe], rules=[rule]), facts)
    resolve_rules(resolved, facts)
    width = facts.width(resolved.probes[0].site)
    if len(vectors[0].values) != 4 * width:  # float32
        raise ValueError(f"{path}: the probe reads rows of {len(vectors[0].values) // 4} elements, not {width}")
    check_vectors(resolved.rules[0].steering, steering_vectors, facts)
    resolved.probes[0].name = resolved.rules[0].name = resolved.rules[0].probe = PREFIX + given.name
    all_vectors = (*vectors, *steering_vectors.values())
    return _OperatorRule(resolved.rules[0], resolved.probes[0], all_vectors, given.tenants, given.may_opt_out)


def _load_probe(path: Path) -> tuple[probe_pb2.Probe, tuple[tensor_pb2.Vector, ...]]:
    """Read a file of the client's `Probe.save`, which documents the format.

    Raises:
        ValueError: The file holds no probe.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as opened:
            names = list(opened.keys())
            file = parse({name: opened.get_tensor(name) for name in names}, opened.metadata() or {})
        message = _probe_of(file)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no probe: {error}") from None
    vectors = tuple(vector_message(row) for row in file.weights)
    for vector, number in zip(vectors, file.bias, strict=True):
        message.outputs.add(digest=vector.digest, bias=float(number))
    return message, vectors


def _probe_of(file: ProbeFile) -> probe_pb2.Probe:
    """Return the message of a file's probe, without the outputs of its first layer.

    Raises:
        ValueError: The arrays do not fit together, are not finite, or a name is unknown.
    """
    for weights, bias in ((file.weights, file.bias), *((layer.weights, layer.bias) for layer in file.mlp)):
        if weights.ndim != 2 or weights.shape[:1] != bias.shape:  # noqa: PLR2004 - outputs and inputs
            raise ValueError(f"weights and bias have the shapes {weights.shape} and {bias.shape}")
        if not (np.isfinite(weights).all() and np.isfinite(bias).all()):
            raise ValueError("its numbers are not all finite")
    message = probe_pb2.Probe(
        layer=file.layer,
        site=capture_pb2.Site.Value(f"SITE_{file.site.upper()}"),
        activation=probe_pb2.ProbeActivation.Value(f"PROBE_ACTIVATION_{_enum_name(file.activation)}"),
        output_names=file.output_names,
    )
    for layer in file.mlp:
        message.mlp.add(
            activation=probe_pb2.HiddenActivation.Value(f"HIDDEN_ACTIVATION_{_enum_name(layer.activation)}"),
            weights=layer.weights.astype("<f4").tobytes(),
            biases=layer.bias.tolist(),
        )
    if file.heads:
        message.attention.heads = file.heads
        if file.position_weights is not None:
            message.attention.position_weights.extend(file.position_weights.ravel().tolist())
    if file.smooth:
        message.smoothing.CopyFrom(from_text(file.smooth))
    return message


def _enum_name(activation: str | None) -> str:
    return activation.upper() if activation else "UNSPECIFIED"
