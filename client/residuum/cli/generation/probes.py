"""The flags for probes and rules, and the printing of scores and events."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import residuum
from residuum.cli.generation import steering
from residuum.cli.output import Output
from residuum.values.probes.scores import Scores
from residuum.values.probes.smoothing import Smoothing, parse_smoothing

_WIDTH = 10
"""Characters of a column on a terminal: the longest number has as many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("probes")
    group.add_argument(
        "--probe",
        dest="probes",
        action="append",
        default=[],
        metavar="FILE[:NAME]",
        help="print the scores of this probe with each token: a file of Probe.save; NAME names the scores; may be "
        "repeated (default: none)",
    )
    group.add_argument(
        "--score-prompt", action="store_true", help="also print the scores of the prompt's positions (default: no)"
    )
    group.add_argument(
        "--without-operator-rules",
        action="store_true",
        help="do without the server's own rules, if its operator allows that (default: no)",
    )
    group.add_argument(
        "--smooth",
        metavar="HOW",
        help="smooth the scores of every --probe: ema:DECAY, max, max:TOKENS, mean or mean:TOKENS (default: as in its "
        "file)",
    )
    group.add_argument(
        "--rule",
        dest="rules",
        action="append",
        default=[],
        metavar="PROBE:RULE",
        help="act when the scores of a --probe, by its name, cross a threshold: above=T or below=T, and after it for=N "
        "(tokens in a row), output=N or its name, name=NAME and one of flag, abort or, at the end, one operation "
        "without a gate, as in add=joy.npy@12*4, each after a comma; may be repeated (default: none)",
    )


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of a generation that the command line sets.

    Raises:
        InvalidRequest: A file holds no probe, or a name is invalid.
    """
    if options.score_prompt and not options.probes:
        options.usage_error("--score-prompt needs --probe; give both")
    for flag in ("smooth", "rules"):
        if getattr(options, flag) and not options.probes:
            options.usage_error(f"--{flag.rstrip('s')} needs --probe; give both")
    smooth = None if options.smooth is None else parse_smoothing(options.smooth)
    probes = [_probe(text, smooth) for text in options.probes]
    return {
        "probes": probes,
        "score_prompt": options.score_prompt,
        "rules": [_rule(text, probes) for text in options.rules],
        "without_operator_rules": options.without_operator_rules,
    }


def _probe(text: str, smooth: Smoothing | None) -> residuum.Probe:
    path, colon, name = text.rpartition(":")
    has_name = bool(colon) and not Path(text).exists()
    probe = residuum.Probe.load(path if has_name else text)
    try:
        return dataclasses.replace(probe, name=name if has_name else probe.name, smooth=smooth or probe.smooth)
    except residuum.InvalidRequest as error:
        raise residuum.InvalidRequest(f"--probe {text}: {error}") from None


def _rule(text: str, probes: Sequence[residuum.Probe]) -> residuum.Rule:
    """Parse PROBE:above=T,OPTION..."""
    probe, _, options = text.partition(":")
    names = {name for item in probes if item.name == probe for name in item.output_names}
    try:
        return residuum.Rule(probe, **_rule_fields(options, names))
    except ValueError as error:
        raise residuum.InvalidRequest(
            f"--rule {text}: {str(error).rstrip('.')}. Use PROBE:above=T or PROBE:below=T, and after it for=N, "
            "output=N, name=NAME, flag, abort or an operation such as add=joy.npy@12*4, each after a comma."
        ) from None


def _rule_fields(options: str, output_names: Container[str]) -> dict[str, Any]:
    """Parse the options of a rule, given the names of its probe's outputs.

    Raises:
        ValueError: An option is unknown, or its value is no number.
    """
    fields: dict[str, Any] = {}
    while options:
        option, _, rest = options.partition(",")
        name, equals, value = option.partition("=")
        if equals and name in {"above", "below"}:
            fields[name] = _number(float, option)
        elif equals and name == "for":
            fields["for_tokens"] = _number(int, option)
        elif equals and name == "output":
            is_index = value.isdecimal() and value not in output_names
            fields["output"] = int(value) if is_index else value
        elif equals and name == "name":
            fields["name"] = value
        elif option in {"flag", "abort"}:
            fields["then"] = option
        elif equals and name in steering.OPERATIONS:  # the last option, because its layers may have commas
            return {**fields, "then": steering.OPERATIONS[name](options.partition("=")[2], {})}
        else:
            raise ValueError(f"{option!r} is not an option of a rule.")
        options = rest
    return fields


def _number(kind: Callable[[str], float], option: str) -> float:
    """Return the number of NAME=NUMBER.

    Raises:
        ValueError: It is none. The message names the option.
    """
    name, _, value = option.partition("=")
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} takes {what}, not {value!r}") from None


class ScorePrinter:
    """Prints the tokens of one sequence as they arrive: on each line the scores, the token's ID, and new text."""

    def __init__(self, probes: Sequence[residuum.Probe], prompt_token_ids: Sequence[int], output: Output) -> None:
        """Print the names of the columns, if a person reads them."""
        self._prompt = iter(prompt_token_ids)
        self._output = output
        self._names = [*(name for probe in probes for name in _columns(probe)), "token"]
        if output.is_terminal:
            self._line(self._names, "text")

    def add(self, delta: residuum.TokenDelta) -> None:
        """Print what a delta has."""
        for numbers in _rows(delta.prompt_scores):
            self._line([*numbers, str(next(self._prompt))], "(prompt)")
        rows = [[*row, str(token)] for row, token in zip(_rows(delta.scores), delta.token_ids, strict=True)]
        if delta.text and not rows:
            rows = [[""] * len(self._names)]
        # The server sends the text of several tokens in one piece, and perhaps later than their scores.
        for index, cells in enumerate(rows, 1):
            self._line(cells, repr(delta.text if index == len(rows) else ""))
        for event in delta.events:
            self._output.note(event_line(event))

    def _line(self, cells: Sequence[str], text: str) -> None:
        if self._output.is_terminal:
            columns = (cell.rjust(max(_WIDTH, len(name))) for name, cell in zip(self._names, cells, strict=True))
            self._output.say("  ".join((*columns, text)))
        else:
            self._output.say("\t".join((*cells, text)))


def event_line(event: residuum.RuleEvent) -> str:
    """Return a line about a rule that fired."""
    place = f", steered from position {event.first_position}" if event.first_position is not None else ""
    return f"rule {event.rule} fired at token {event.token}, score {_text(event.score)}: {event.action}{place}"


def score_lines(reply: residuum.Reply, sequence: residuum.Sequence, probes: Sequence[residuum.Probe]) -> list[str]:
    """Return a line for each output of each probe, with the scores of all tokens, and one for each rule that fired."""
    index = next(index for index, item in enumerate(reply.sequences) if item is sequence)
    of_prompt = reply.prompt_scores if index == 0 else None
    events = (f"  {event_line(event)}" for event in reply.events if event.sequence == index)
    return [*_lines(of_prompt, " (prompt)", probes), *_lines(sequence.scores, "", probes), *events]


def _lines(scores: Scores | None, what: str, probes: Sequence[residuum.Probe]) -> Iterator[str]:
    columns = {probe.name: _columns(probe) for probe in probes}
    for probe, array in (scores or {}).items():
        rows = array.reshape(len(array), -1).T if len(array) else ()
        for name, column in zip(columns[probe], rows, strict=False):
            yield f"  {name}{what}: {' '.join(map(_text, column))}"


def _rows(scores: Scores | None) -> Iterator[list[str]]:
    """Yield the scores of each token: those of all probes, with all their outputs."""
    arrays = [array.reshape(len(array), -1) for array in (scores or {}).values() if len(array)]
    for row in zip(*arrays, strict=True):
        yield [_text(number) for numbers in row for number in numbers]


def _columns(probe: residuum.Probe) -> list[str]:
    count = probe.num_outputs
    return [probe.name] if count == 1 else [f"{probe.name}.{name}" for name in probe.output_names or range(count)]


def _text(number: Any) -> str:
    return f"{number:.4g}"
