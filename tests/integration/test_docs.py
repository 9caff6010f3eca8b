"""Every code block of the documentation runs against both services, page by page from top to bottom.

The Python blocks of a page are one program, and its shell lines run in between, all in a separate folder. Only the
endpoints are changed, because pages name the default ports and the tests' services have free ports.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import residuum
from tests.docs.blocks import DOCS, PAGES, ROOT, RUN, Block, blocks
from tests.observing import metrics_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from svc_common.launcher import Service

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

RUNNABLE = [page for page in PAGES if any(block.language in RUN and not block.reason for block in blocks(page))]
SHELL_SECONDS = 120


class Walk:
    """Runs the blocks of one page."""

    def __init__(self, store: Service, inference: Service) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._endpoints = {"localhost:50051": inference.endpoint, "localhost:50052": store.endpoint}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RESIDUUM_")},
            "RESIDUUM_ENDPOINT": inference.endpoint,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), str(ROOT)]),  # this checkout, not the installation
        }

    def run(self, block: Block) -> None:
        """Run a block."""
        {"python": self.python, "pycon": self.session, "console": self.shell}[block.language](block)

    def python(self, block: Block) -> None:
        """Run a program in the page's namespace."""
        exec(compile(self._here(block.source), str(block.page), "exec"), self.names)

    def session(self, block: Block) -> None:
        """Run an interactive session. Its output must equal the page's, where … matches anything."""
        text = self._here(block.code).replace("…", "...")
        test = doctest.DocTestParser().get_doctest(text, self.names, str(block), str(block.page), block.line - 1)
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        told: list[str] = []
        runner = doctest.DocTestRunner(optionflags=options, verbose=False)
        assert not runner.run(test, out=told.append, clear_globs=False).failed, "".join(told)
        self.names.update(test.globs)

    def shell(self, block: Block) -> None:
        """Run the typed commands. Their output is not compared."""
        for command in block.commands:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", self._here(command)],
                env=self._environment, capture_output=True, text=True, timeout=SHELL_SECONDS, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{block}: {command}\n{done.stdout}\n{done.stderr}"

    def _here(self, code: str) -> str:
        for named, real in self._endpoints.items():
            code = code.replace(named, real)
        return code


@pytest.fixture
def walk(
    services: tuple[Service, Service], client: residuum.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Walk]:
    """Each page runs in an empty folder. Captures that it leaves are deleted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    before = {summary.capture_id for summary in client.captures()}
    walk = Walk(*services)
    yield walk
    for value in walk.names.values():
        if isinstance(value, residuum.Client):
            value.close()
    for summary in client.captures():
        if summary.capture_id not in before:
            client.delete(summary.capture_id)


def check_that_a_rule_ended_the_reply(names: dict[str, Any]) -> None:
    reply = names["reply"]
    assert (reply.finish_reason, reply.stop_reason) == ("rule", "sad")
    assert [event.rule for event in reply.events] == ["sad"]


def check_that_a_rule_steered_the_reply(names: dict[str, Any]) -> None:
    fired = [(event.rule, event.action) for event in names["reply"].events if event.first_position is not None]
    assert fired == [("cheer", "steer")]


def check_that_features_were_clamped(names: dict[str, Any]) -> None:
    """The replies have the feature's values that the page's formula says, compared with rows that were not steered."""
    client, sae, number, peak = names["client"], names["sae"], names["number"], names["peak"]
    plain, removed, strong = names["replies"]
    for reply, low, high, first in (
        (plain, -np.inf, np.inf, 0),
        (removed, 0.0, 0.0, 0),
        (strong, 2 * peak, np.inf, len(strong.prompt_token_ids)),
    ):
        # Steering after layer 15 changes nothing before it, so these are the rows that the clamp got.
        tokens = [*reply.prompt_token_ids, *reply.token_ids][:-1]
        raw = client.generate(tokens, max_tokens=0, capture=residuum.Capture(layers=[15]))
        rows = client.activations(raw)[15].astype(np.float64)
        values = sae.encode(rows)[:, number]
        moves = np.clip(values, low, high) - values
        moves[:first] = 0
        expected = sae.encode(rows + moves[:, None] * sae.decoder[number])[:, number]
        assert np.abs(client.activations(reply).feature(15, number) - expected).max() < 0.1 * peak
        if reply is not plain:
            assert np.abs(expected - values).max() > 0.5 * peak, "otherwise the clamp changed too little"


OUTCOMES: dict[str, dict[str, Callable[[dict[str, Any]], None]]] = {
    "howto/watch.md": {
        'then="abort", name="sad"': check_that_a_rule_ended_the_reply,
        'name="cheer"': check_that_a_rule_steered_the_reply,
    },
    "howto/sae-features.md": {"strong = residuum.ClampFeature": check_that_features_were_clamped},
}
"""What must be true after the block of a page that contains a text. These pages only print what happened."""


def test_the_example_in_the_help_of_the_package_has_these_rows(walk: Walk) -> None:
    walk.names["direction"] = np.full(576, 1e-6, np.float32)  # changes nothing, so that the reply is long enough
    assert residuum.__doc__
    walk.session(Block(ROOT / "client/residuum/__init__.py", 1, "pycon", residuum.__doc__, None))


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_blocks_of_a_page_run(page: Path, walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = dict(OUTCOMES.get(os.path.relpath(page, DOCS), {}))
    for block in blocks(page):
        if block.language in RUN and not block.reason:
            walk.run(block)
            for text in [text for text in outcomes if text in block.code]:
                outcomes.pop(text)(walk.names)
    assert not outcomes, "no block contains these texts any more"
    assert not re.search(r"\bnp\.\w+\(", capsys.readouterr().out), "a number that a page prints is one of numpy"


def test_most_pages_run() -> None:
    assert len(RUNNABLE) > 12


@pytest.mark.parametrize(("language", "code"), [
    ("python", "assert False"),
    ("pycon", ">>> 1 + 1\n3\n"),
    ("console", "$ residuum pull there-is-no-such-capture\n"),
])  # fmt: skip
def test_a_failing_block_is_detected(walk: Walk, language: str, code: str) -> None:
    with pytest.raises(AssertionError):
        walk.run(Block(ROOT / "README.md", 1, language, code, None))


def test_every_metric_is_documented(services: tuple[Service, Service]) -> None:
    """The page on monitoring names exactly the metrics that both services export."""
    shown: set[str] = set()
    for service in services:
        shown |= set(re.findall(r"^# TYPE (residuum_\w+?)(?:_total)? ", metrics_text(service), re.MULTILINE))
    told: set[str] = set()
    page = (DOCS / "operations/monitoring.md").read_text()
    tables = re.findall(r"^\| (?:both|.*?`(residuum_\w+_)`) \| \|$\n(.*?)\n\n", page, re.DOTALL | re.MULTILINE)
    for prefix, table in tables:
        for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE):
            told |= {prefix + name.removesuffix("_total") for name in re.findall(r"`([a-z_]+)[{`]", cell)}
    # Only a store with an archive has these.
    told = {name for name in told if not name.startswith("residuum_store_archive_")}
    assert told == {name for name in shown if not name.endswith("_created")} | {"residuum_store_retain_bytes"}
