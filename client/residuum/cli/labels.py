"""The command `label`, and labels as texts of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

import residuum
from residuum.cli.connection import open_client
from residuum.cli.output import Output, text
from residuum.wire.labels import LabelValue, read_value, write_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `label`."""
    parser.add_argument("id", metavar="ID", help="the capture's ID")
    parser.add_argument(
        "labels",
        nargs="*",
        metavar="NAME=VALUE",
        help="a label to set. The value is read as a number, true or false, or else as a text; quotes make it a text",
    )
    parser.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="NAME",
        help="a label to remove; may be repeated (default: none)",
    )


def add_where(parser: argparse.ArgumentParser, help_text: str, default: str) -> None:
    """Add --where, a filter on labels."""
    parser.add_argument(
        "--where",
        metavar="FILTER",
        default="",
        help=f"{help_text}, such as 'split = train and y >= 2' (default: {default})",
    )


def label(options: argparse.Namespace, output: Output) -> int:
    """Change the labels of a capture."""
    given = parse_labels(options.labels)
    if both := [name for name in options.remove if name in given]:
        options.usage_error(f"the label {both[0]!r} is to be set and removed; choose one")
    changes: dict[str, LabelValue | None] = {**given, **dict.fromkeys(options.remove)}
    if not changes:
        options.usage_error("give labels to set, as NAME=VALUE, or to --remove")
    with open_client(options) as client:
        labels = client.label(options.id, changes)
    if output.as_json:
        output.json({"capture_id": options.id, "labels": labels})
    else:
        output.say(f"{options.id}: {text(labels_text(labels)) or 'no labels'}")
    return 0


def parse_labels(texts: Iterable[str]) -> dict[str, LabelValue]:
    """Return the labels of texts such as "split=train" or "y=1". Values are read as in a filter.

    Raises:
        InvalidRequest: A text has another form, or two name the same label.
    """
    labels: dict[str, LabelValue] = {}
    for item in texts:
        name, equals, value = item.partition("=")
        if not equals:
            raise residuum.InvalidRequest(f"{item!r} is not a label; use NAME=VALUE, such as split=train or y=1.")
        if name in labels:
            raise residuum.InvalidRequest(f"The label {name!r} is given twice. Give each label once.")
        labels[name] = read_value(value)
    return labels


def labels_text(labels: Mapping[str, LabelValue]) -> str:
    """Return labels as in a filter, such as "split = train and y = 1"."""
    return " and ".join(f"{name} = {write_value(value)}" for name, value in labels.items())
