"""Sphinx extension: replaces a comment `<!-- generated: NAME -->` with Markdown generated from code or results.

The names:

* `commands`: the commands of `residuum`, with their arguments.
* `bars all`, `bars missed`: the benchmarks' targets and the measured values, from `bench/results`.
* `methods Client`: the public methods of a class, each with a link and the first sentence of its docstring.
* `settings store`, `settings inference`: the settings of a service, each with its flag, default and description.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pydantic.fields import FieldInfo
    from sphinx.application import Sphinx

    from svc_common.settings import ServiceSettings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"

MARK = re.compile(r"^<!-- generated: (\w+)(?: (\w+))? -->$", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension's handlers to Sphinx."""
    app.connect("source-read", read)
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def read(app: Sphinx, _page: str, source: list[str]) -> None:
    """Replace the marks in a page with the generated text."""

    def made(mark: re.Match[str]) -> str:
        app.env.metadata[app.env.docname]["generated"] = mark[1]
        return "\n".join(MAKERS[mark[1]](*(mark.groups()[1:] if mark[2] else ())))

    source[0] = MARK.sub(made, source[0])


def outdated(app: Sphinx, *_pages: object) -> list[str]:
    """Return the pages with generated parts. Sphinx always reads them again: their sources may have changed."""
    return [page for page, facts in app.env.metadata.items() if "generated" in facts]


def commands() -> Iterator[str]:
    """Yield a section for each command."""
    from residuum.cli.main import make_parser

    found = list(_commands(make_parser(), "residuum"))
    common = {action.dest: action for action in _actions(dict(found)["residuum info"])}
    yield from ("## Flags of all commands", "")
    yield from ("All commands take these flags, with these exceptions:", "")
    yield "* `residuum serve` and `residuum vllm-serve` start services. They take none of these flags."
    yield "* `residuum token` calls no service. It takes only `--json`."
    yield "* `residuum health` asks one service. It takes neither `--store` nor `--tenant`."
    yield "* For `generate`, `directions`, `pull`, `follow` and `manifest`, `--timeout` limits the whole command. The"
    yield "  default is no limit."
    yield ""
    yield from _arguments(common.values())
    for name, command in found:
        own = [action for action in _actions(command) if action.dest not in common]
        description, _, examples = (command.description or "").partition("\n\nexamples:\n")
        yield from ("", f"## `{name}`", "", _text(description), "")
        yield from ("```text", _usage(name, own), "```", "")
        if examples:
            yield from ("```console", *(f"$ {line.strip()}" for line in examples.splitlines()), "```", "")
        yield from _arguments(own)


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    if not groups:
        yield name, parser
    for group in groups:
        for word, command in group.choices.items():
            yield from _commands(command, f"{name} {word}")


def _actions(command: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in command._actions if action.dest != "help"]  # noqa: SLF001 - argparse has no public way


def _usage(name: str, own: list[argparse.Action]) -> str:
    parts = [name]
    for action in own:
        if not action.option_strings:
            parts.append(f"{action.metavar or action.dest}{' ...' if action.nargs == '+' else ''}")
        elif action.required:
            parts.append(f"{action.option_strings[-1]} {action.metavar}")
    return " ".join([*parts, "[FLAGS]"])


def _arguments(actions: Iterable[argparse.Action]) -> Iterator[str]:
    rows = [f"| {_argument(action)} | {_text(action.help or '')} |" for action in actions]
    if rows:
        yield from ("| | |", "| --- | --- |", *rows)


def _argument(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    named = action.metavar or " / ".join(map(str, action.choices or ())) or action.dest.upper()
    value = "" if action.nargs == 0 else f" {named}"
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)


def methods(name: str) -> Iterator[str]:
    """Yield a table of the public methods of a class of `residuum`, with the first sentence of each docstring."""
    import residuum

    kind = getattr(residuum, name)
    yield from ("| method | |", "| --- | --- |")
    for method in sorted(item for item in dir(kind) if not item.startswith("_")):
        text = (inspect.getdoc(getattr(kind, method)) or "").partition("\n\n")[0]
        yield f"| {{py:meth}}`{method} <residuum.{name}.{method}>` | {_text(text)} |"


def settings(service: str) -> Iterator[str]:
    """Yield a table of a service's settings."""
    from inference_svc.settings import InferenceSettings
    from store_svc.settings import StoreSettings

    kinds: dict[str, type[ServiceSettings]] = {"inference": InferenceSettings, "store": StoreSettings}
    yield from ("| flag | default | |", "| --- | --- | --- |")
    for name, field in kinds[service].model_fields.items():
        yield f"| `--{name.replace('_', '-')}` | {_default(field)} | {_text(field.description or '')} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, tuple):
        value = ",".join(value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _text(text: str) -> str:
    """Return a text as a table cell, with values from this machine's environment replaced by the defaults."""
    text = re.sub(r", now [^)]+\)", ", or localhost:50051)", text).replace("%%", "%")
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").strip()


def bars(which: str) -> Iterator[str]:
    """Yield a table of all targets ("all"), or of the missed targets ("missed")."""
    rows = []
    for path in sorted(RESULTS.glob("*/*.json")):
        result = json.loads(path.read_text())
        made_by = f"`{result.get('benchmark')}` at {result['revision']['commit'][:7]}, {path.parent.name}"
        for bar in _bars(result):
            sign, measured = "≤" if bar["at_most"] else "≥", "none" if bar["value"] is None else f"{bar['value']:.4g}"
            outcome = "reached" if bar["passed"] else "**missed**"
            if which == "all" or not bar["passed"]:
                rows.append(f"| {bar['name']} | {measured} | {sign} {bar['limit']:g} | {outcome} | {made_by} |")
    if rows:
        yield from ("| | measured | target | | by |", "| --- | ---: | ---: | --- | --- |", *rows)
    else:
        yield "All targets are reached."


def _bars(result: Any) -> Iterator[dict[str, Any]]:
    for name, value in result.items() if isinstance(result, dict) else ():
        yield from value if name == "bars" else _bars(value)


MAKERS: dict[str, Callable[..., Iterator[str]]] = {
    "bars": bars,
    "commands": commands,
    "methods": methods,
    "settings": settings,
}
