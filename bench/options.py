"""The command-line flags and types that several benchmarks share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bench.capture.shapes import SHAPES, write_shape
from examples.model import default_model

_T = TypeVar("_T")


def positive(text: str) -> int:
    """Return the positive integer in a text."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive; give an integer above 0")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Return the integers in a list separated by commas, sorted and without duplicates."""
    return tuple(sorted({int(number) for number in text.split(",")}))


def positives(text: str) -> tuple[int, ...]:
    """Return the same as `numbers`, for integers above zero."""
    return tuple(sorted({positive(number) for number in text.split(",")}))


def words(choices: Iterable[_T]) -> Callable[[str], list[_T]]:
    """Return a parser for a list, separated by commas, of some of these words or enumeration members."""
    return named({str(getattr(choice, "value", choice)): choice for choice in choices})


def named(choices: Mapping[str, _T]) -> Callable[[str], list[_T]]:
    """Return a parser for a list of names, separated by commas. It returns the values of the names."""

    def read(text: str) -> list[_T]:
        try:
            return [choices[name] for name in text.split(",")]
        except KeyError:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(choices)}") from None

    return read


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the model."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="the model's folder, or its name on the Hugging Face hub (default: SmolLM2)")
    which.add_argument("--shape", choices=sorted(SHAPES), help="a model's shape: random weights, no tokenizer")


def model_of(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the model, and the arguments of vLLM that its shape needs."""
    if options.shape:
        return write_shape(options.shape), SHAPES[options.shape].engine_args
    return options.model or default_model(), {}


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Add the flag for arguments of vLLM that have no flag of their own."""
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further vLLM arguments, as a JSON object")


def add_output(parser: argparse.ArgumentParser, *, parts: bool = False) -> None:
    """Add the flag for the output file."""
    more = "; it keeps its other parts if machine and revision are the same" if parts else ""
    parser.add_argument("--output", type=Path, help=f"a JSON file for the result{more}")
