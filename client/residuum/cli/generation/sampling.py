"""The flags for sampling and log-probabilities."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import residuum
from residuum.cli.output import Output

_SINGLE: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "the most tokens to generate for each reply; 0 only computes the prompt (default: 16)"),
    "temperature": (float, "the sampling temperature, up to 2 (default: 0, greedy)"),
    "top_p": (float, "sample from the most likely tokens with this total probability (default: 1)"),
    "top_k": (int, "sample from this many most likely tokens (default: 0, all)"),
    "min_p": (float, "sample from tokens with at least this fraction of the greatest probability (default: 0)"),
    "seed": (int, "the random seed, which makes sampling repeatable (default: none)"),
    "min_tokens": (int, "the fewest tokens to generate (default: 0)"),
    "n": (int, "the number of replies, at most 64 (default: 1)"),
    "presence_penalty": (float, "lower the logits of tokens that the reply has, from -2 to 2 (default: 0)"),
    "frequency_penalty": (float, "the same, for each time that the reply has the token, from -2 to 2 (default: 0)"),
    "repetition_penalty": (
        float,
        "lower logits of tokens that prompt or reply have by this factor, above 0 (default: 1)",
    ),
    "logprobs": (int, "with --json: print log-probabilities, and this many most likely tokens (default: none)"),
    "prompt_logprobs": (int, "with --json: the same for the prompt's tokens (default: none)"),
    "truncate_prompt": (int, "use only this many tokens of the prompt, from its start (default: all)"),
    "regex": (str, "make the reply match this regular expression (default: none)"),
}
"""The parameters that are one number or text, with their help texts."""

_LOGPROBS = {"logprobs", "prompt_logprobs"}

_REPEATED: dict[str, tuple[str, type, str, str]] = {
    "stop": ("--stop", str, "TEXT", "stop at this text"),
    "stop_token_ids": ("--stop-token-id", int, "ID", "stop after this token"),
    "bad_words": ("--bad-word", str, "WORD", "a word that the reply must not contain"),
    "logit_bias": ("--logit-bias", str, "ID:BIAS", "add to a token's logit"),
}
"""The parameters whose flags may be repeated: flag, kind, placeholder and help text."""


def add_arguments(parser: argparse.ArgumentParser, *, max_tokens: int = 16, logprobs: bool = True) -> None:
    """Add the flags.

    Args:
        parser: The parser of a command.
        max_tokens: The default that the help shows.
        logprobs: Whether the command can print log-probabilities.
    """
    group = parser.add_argument_group("sampling")
    for name, (kind, help_text) in _SINGLE.items():
        if name in _LOGPROBS and not logprobs:
            continue
        text = help_text.replace("(default: 16)", f"(default: {max_tokens})")
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name[0].upper(), help=text)
    for name, (flag, kind, metavar, text) in _REPEATED.items():
        help_text = f"{text}; may be repeated (default: none)"
        group.add_argument(flag, dest=name, action="append", type=kind, metavar=metavar, help=help_text)
    group.add_argument(
        "--json-schema",
        metavar="FILE",
        help="make the reply JSON that matches this schema: a file, or JSON (default: none)",
    )


def parameters_of(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Return the sampling parameters that the command line sets.

    Raises:
        InvalidRequest: A flag is invalid.
    """
    names = (*_SINGLE, *_REPEATED, "json_schema")
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if not output.as_json and given.keys() & _LOGPROBS:
        options.usage_error("--logprobs and --prompt-logprobs need --json, which prints them; give both")
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    if "json_schema" in given and not given["json_schema"].lstrip().startswith("{"):
        try:
            given["json_schema"] = Path(given["json_schema"]).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            where = f"byte {error.start} is {error.object[error.start]:#04x}"
            raise residuum.InvalidRequest(f"--json-schema {given['json_schema']} is not UTF-8: {where}.") from None
    return given


def _biases(texts: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token_id, bias in map(_bias, texts):
        if token_id in biases:
            raise residuum.InvalidRequest(f"--logit-bias is given twice for the token {token_id}. Give it once.")
        biases[token_id] = bias
    return biases


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise residuum.InvalidRequest(f"--logit-bias {text}: use TOKEN_ID:BIAS, such as 504:-2.5.") from None
