"""What the command lines of several benchmarks have in common."""

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
    """Read a number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Read numbers that are separated by commas; return them in order, each once."""
    return tuple(sorted({int(number) for number in text.split(",")}))


def positives(text: str) -> tuple[int, ...]:
    """Read the same, all above zero."""
    return tuple(sorted({positive(number) for number in text.split(",")}))


def words(choices: Iterable[_T]) -> Callable[[str], list[_T]]:
    """Return a reader of some of these words or enumeration members, separated by commas."""
    return named({str(getattr(choice, "value", choice)): choice for choice in choices})


def named(choices: Mapping[str, _T]) -> Callable[[str], list[_T]]:
    """Return a reader of names that are separated by commas, which returns what they name."""

    def read(text: str) -> list[_T]:
        try:
            return [choices[name] for name in text.split(",")]
        except KeyError:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(choices)}") from None

    return read


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model is served."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="the model's folder, or its name on the Hugging Face hub (default: SmolLM2)")
    which.add_argument("--shape", choices=sorted(SHAPES), help="a model's shape with random weights, no tokenizer")


def model_of(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the model, and what vLLM must be told because of its shape."""
    if options.shape:
        return write_shape(options.shape), SHAPES[options.shape].engine_args
    return options.model or default_model(), {}


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Add the flag for what has none."""
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more of vLLM's arguments, as a JSON object")


def add_output(parser: argparse.ArgumentParser, *, parts: bool = False) -> None:
    """Add the flag that says where the result goes."""
    more = "; parts that it holds already stay, if machine and revision are the same" if parts else ""
    parser.add_argument("--output", type=Path, help=f"a JSON file for the result{more}")
