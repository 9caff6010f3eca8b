"""The flags for probes, and the printing of their scores."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import residuum
from residuum.cli.output import Output
from residuum.values.scores import Scores

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


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of a generation that the command line sets.

    Raises:
        InvalidRequest: A file holds no probe, or a name is invalid.
    """
    if options.score_prompt and not options.probes:
        options.usage_error("--score-prompt needs --probe; give both")
    return {"probes": [_probe(text) for text in options.probes], "score_prompt": options.score_prompt}


def _probe(text: str) -> residuum.Probe:
    path, colon, name = text.rpartition(":")
    if not colon or Path(text).exists():
        return residuum.Probe.load(text)
    probe = residuum.Probe.load(path)
    try:
        return dataclasses.replace(probe, name=name)
    except residuum.InvalidRequest as error:
        raise residuum.InvalidRequest(f"--probe {text}: {error}") from None


class ScorePrinter:
    """Prints the tokens of one sequence as they arrive, one on a line, after their scores."""

    def __init__(self, probes: Sequence[residuum.Probe], prompt_token_ids: Sequence[int], output: Output) -> None:
        """Print the names of the columns, if a person reads them."""
        self._prompt = iter(prompt_token_ids)
        self._output = output
        self._names = [name for probe in probes for name in _columns(probe)]
        if output.is_terminal:
            self._line(self._names, "token")

    def add(self, delta: residuum.TokenDelta) -> None:
        """Print what a delta has."""
        for numbers in _rows(delta.prompt_scores):
            self._line(numbers, f"prompt token {next(self._prompt)}")
        rows = list(_rows(delta.scores))
        if delta.text and not rows:
            rows = [[""] * len(self._names)]
        for index, numbers in enumerate(rows, 1):  # the server sends the text of several tokens in one piece
            self._line(numbers, repr(delta.text if index == len(rows) else ""))

    def _line(self, cells: Sequence[str], text: str) -> None:
        if self._output.is_terminal:
            columns = (cell.rjust(max(_WIDTH, len(name))) for name, cell in zip(self._names, cells, strict=True))
            self._output.say("  ".join((*columns, text)))
        else:
            self._output.say("\t".join((*cells, text)))


def score_lines(reply: residuum.Reply, sequence: residuum.Sequence) -> list[str]:
    """Return a line for each output of each probe, with the scores of all tokens; none if there are no scores."""
    of_prompt = reply.prompt_scores if sequence is reply.sequences[0] else None
    return [*_lines(of_prompt, " (prompt)"), *_lines(sequence.scores, "")]


def _lines(scores: Scores | None, what: str) -> Iterator[str]:
    for probe, array in (scores or {}).items():
        for number, column in enumerate(array.reshape(len(array), -1).T if len(array) else ()):
            name = probe if array.ndim == 1 else f"{probe}.{number}"
            yield f"  {name}{what}: {' '.join(map(_text, column))}"


def _rows(scores: Scores | None) -> Iterator[list[str]]:
    """Yield the scores of each token: those of all probes, with all their outputs."""
    arrays = [array.reshape(len(array), -1) for array in (scores or {}).values() if len(array)]
    for row in zip(*arrays, strict=True):
        yield [_text(number) for numbers in row for number in numbers]


def _columns(probe: residuum.Probe) -> list[str]:
    count = probe.num_outputs
    return [probe.name] if count == 1 else [f"{probe.name}.{number}" for number in range(count)]


def _text(number: Any) -> str:
    return f"{number:.4g}"
