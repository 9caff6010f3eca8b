"""The file of the operator's rules, which is read at the start.

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
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference_svc.admission.operator_rules import OperatorRule, OperatorRules
from inference_svc.admission.operator_steering import check_vectors, load_steering
from inference_svc.admission.probes import num_products, resolve_probes
from inference_svc.admission.rules import ABORT, FLAG, STEER, resolve_rules
from inference_svc.resources.vector_cache import OPERATOR
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, probe_pb2, rule_pb2, tensor_pb2
from residuum.wire.digests import vector_message
from residuum.wire.limits import MAX_OPERATOR_RULES, MAX_PROBE_OUTPUTS
from residuum.wire.probes.arithmetic import is_valid_probe_name
from residuum.wire.probes.files import ProbeFile, parse
from residuum.wire.probes.rules import problem_of
from residuum.wire.probes.smoothing import from_text
from residuum.wire.selection import selects_any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic_core import ErrorDetails

    from inference_svc.model_facts import ModelFacts


class RulesFileError(OSError):
    """A file of rules cannot be used. The message says why."""


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


class _UncheckedRule(NamedTuple):
    """A rule of a file with what its other files hold, not yet checked against a model."""

    given: _Rule
    path: Path
    """The probe's file."""
    rule: rule_pb2.Rule
    probe: probe_pb2.Probe
    vectors: tuple[tensor_pb2.Vector, ...]
    steering_vectors: dict[bytes, tensor_pb2.Vector]


class RulesFile:
    """A file of rules, with the files that it names. It is read without a model; `for_model` checks the rest."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            RulesFileError: The file, or one that it names, cannot be used.
        """
        self._path = path
        try:
            file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise RulesFileError(f"rules: {path} cannot be read: {error.strerror or error}") from None
        except ValidationError as error:
            raise RulesFileError(f"rules: {path}: {'; '.join(map(_problem, error.errors()))}") from None
        except ValueError as error:
            raise RulesFileError(f"rules: {path} is not TOML: {error}") from None
        if not file.rule:
            raise RulesFileError(f"rules: {path} has no rules. Each begins with [[rule]].")
        twice = [name for name, times in Counter(rule.name for rule in file.rule).items() if times > 1]
        if twice or len(file.rule) > MAX_OPERATOR_RULES:
            problem = f"several rules are named {twice[0]}" if twice else f"there are {len(file.rule)} rules"
            raise RulesFileError(f"rules: {path}: {problem}. At most {MAX_OPERATOR_RULES} rules, each of another name.")
        self._rules = []
        for rule in file.rule:
            with self._naming(rule):
                self._rules.append(_read(rule, path.parent))
        outputs = sum(num_products(item.probe) for item in self._rules)
        if outputs >= MAX_PROBE_OUTPUTS:
            # One is left to callers: a limit of 0 tells them that the server has no probes.
            raise RulesFileError(
                f"rules: {path}: the probes have {outputs} outputs, each counted once for each place that its probe "
                f"reads; at most {MAX_PROBE_OUTPUTS - 1} in all, so that requests can have probes of their own."
            )

    def for_model(self, facts: ModelFacts) -> OperatorRules:
        """Check the rules against a model, and return them.

        Raises:
            RulesFileError: A rule does not fit the model.
        """
        rules = []
        for item in self._rules:
            with self._naming(item.given):
                rules.append(_fitted(item, facts))
        return OperatorRules(rules)

    @contextmanager
    def _naming(self, rule: _Rule) -> Iterator[None]:
        """Name the file and the rule in errors."""
        try:
            yield
        except Failure as failure:
            raise RulesFileError(f"rules: {self._path}: the rule {rule.name!r}: {failure.message}") from None
        except ValueError as error:
            raise RulesFileError(f"rules: {self._path}: the rule {rule.name!r}: {error}") from None


def _problem(error: ErrorDetails) -> str:
    """Return a problem of a file's tables in words."""
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "tuple_type":
        name = ".".join(part for part in error["loc"] if isinstance(part, str))
        return f"write [[{name}]], not [{name}]"
    if error["type"] != "extra_forbidden":
        return f"{place}: {error['msg']}"
    known = _Rule.model_fields if len(error["loc"]) > 1 else _File.model_fields
    return f"there is no field {place}. Known here: {', '.join(known)}"


def _read(given: _Rule, folder: Path) -> _UncheckedRule:
    """Return a rule with its probe.

    Raises:
        ValueError: A file holds no probe or vector, or the rule is invalid.
    """
    if not is_valid_probe_name(given.name):
        raise ValueError("a rule's name has 1 to 64 of the characters a-z A-Z 0-9 . _ -")
    if (given.above is None) == (given.below is None):
        raise ValueError("it needs either above or below")
    path = folder / given.probe
    probe, vectors = _load_probe(path)
    probe.name = given.name  # each rule has a probe of its own
    if isinstance(given.output, str) and given.output not in probe.output_names:
        raise ValueError(f"{path}: the probe has no output {given.output!r}; it has {list(probe.output_names)}")
    output = given.output if isinstance(given.output, int) else list(probe.output_names).index(given.output)
    rule = rule_pb2.Rule(name=given.name, probe=given.name, output=output, for_tokens=given.for_tokens)
    rule.action = {"flag": FLAG, "abort": ABORT, "steer": STEER}[given.then]
    if (rule.action == STEER) != bool(given.steer):
        raise ValueError("it needs [[rule.steer]] if then is 'steer', and must have none otherwise")
    steering, steering_vectors = load_steering(given.steer, folder)
    rule.steering.CopyFrom(steering)
    if given.above is not None:
        rule.above = given.above
    if given.below is not None:
        rule.below = given.below
    if problem := problem_of(rule, probe):
        raise ValueError(f"it is invalid: {problem}")
    return _UncheckedRule(given, path, rule, probe, vectors, steering_vectors)


def _fitted(unchecked: _UncheckedRule, facts: ModelFacts) -> OperatorRule:
    """Return a rule for a model.

    Raises:
        Failure, ValueError: The rule or its probe does not fit the model.
    """
    resolved = resolve_probes(probe_pb2.ProbeSpec(probes=[unchecked.probe], rules=[unchecked.rule]), facts)
    resolve_rules(resolved, facts)
    width, length = facts.width(resolved.probes[0].site), len(unchecked.vectors[0].values) // 4  # float32
    if length != width:
        raise ValueError(f"{unchecked.path}: the probe reads rows of {length} elements, not {width}")
    steering = resolved.rules[0].steering
    check_vectors(steering, unchecked.steering_vectors, facts)
    # A prompt of one token leaves the most positions to generate.
    may_apply = (selects_any(item.positions, 1, 1, facts.max_model_len) for item in steering.operations)
    if steering.operations and not any(may_apply):
        raise ValueError("its steer would never apply: it selects no position after the prompt; choose other positions")
    name = OPERATOR + unchecked.given.name  # which no caller's rule can have
    resolved.probes[0].name = resolved.rules[0].name = resolved.rules[0].probe = name
    vectors = (*unchecked.vectors, *unchecked.steering_vectors.values())
    return OperatorRule(
        resolved.rules[0], resolved.probes[0], vectors, unchecked.given.tenants, unchecked.given.may_opt_out
    )


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
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no probe: {error}") from None
    parts = np.split(file.weights, len(file.places), axis=1)
    vectors = [[vector_message(row) for row in part] for part in parts]
    for vector, number in zip(vectors[0], file.bias, strict=True):
        message.outputs.add(digest=vector.digest, bias=float(number))
    for place, own in zip(message.further_places, vectors[1:], strict=True):
        place.digests.extend(vector.digest for vector in own)
    return message, tuple(vector for own in vectors for vector in own)


def _probe_of(file: ProbeFile) -> probe_pb2.Probe:
    """Return the message of a file's probe, without the vectors of its first layer.

    Raises:
        ValueError: The arrays do not fit together, are not finite, or a name is unknown.
    """
    for weights, bias in ((file.weights, file.bias), *((layer.weights, layer.bias) for layer in file.mlp)):
        if weights.ndim != 2 or weights.shape[:1] != bias.shape:  # noqa: PLR2004 - outputs and inputs
            raise ValueError(f"weights and bias have the shapes {weights.shape} and {bias.shape}")
        if not (np.isfinite(weights).all() and np.isfinite(bias).all()):
            raise ValueError("its numbers are not all finite")
    if file.weights.shape[1] % len(file.places):
        raise ValueError(
            f"its rows of {file.weights.shape[1]} elements cannot be those of {len(file.places)} places of equal width"
        )
    places = [(capture_pb2.Site.Value(f"SITE_{site.upper()}"), layer) for site, layer in file.places]
    message = probe_pb2.Probe(
        layer=places[0][1],
        site=places[0][0],
        further_places=[probe_pb2.ProbePlace(layer=layer, site=site) for site, layer in places[1:]],
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
